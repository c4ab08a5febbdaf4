"""Qwen3-MoE from checkpoints, against Hugging Face transformers' recorded logits and tokens."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_hpc.cache import pages_for
from jax_hpc.generate import Generator
from jax_hpc.loading import load_model
from jax_hpc.models import Qwen3MoE, Qwen3MoEConfig
from jax_hpc.step import StepInputs
from tests.support import golden_checkpoints, tiny_models
from tests.support.numerics import assert_close, cosine

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
PAGE = 64
MARGIN = 1e-3
"""Steps of a smaller top-2 margin may go either way, and end a comparison of tokens."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo checkpoint, and the tiny ones written from their recipes."""
    manifest = json.loads((GOLDEN / "manifest.json").read_text())
    found = {"demo": ROOT / "models" / "demo_checkpoint"}
    for name in golden_checkpoints.RECIPES:
        tensors = golden_checkpoints.make_tensors(golden_checkpoints.RECIPES[name])
        digest = golden_checkpoints.tensor_hash(tensors)
        assert digest == manifest[name]["tensors_sha256"], "not the tensors the goldens are of"
        found[name] = golden_checkpoints.write_checkpoint(tmp_path_factory.mktemp(name), name)
    return found


@functools.cache
def loaded(directory: Path, dtype: str) -> Any:
    return load_model(directory, dtype=dtype, progress=False)


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as stored:
        return dict(stored)


def logits_of(
    model: Any, tokens: np.ndarray, positions: np.ndarray, **cache_options: Any
) -> np.ndarray:
    """Logits at some positions of a prompt, by one prefill step."""
    count = len(tokens)
    width = pages_for(count, PAGE)
    inputs = StepInputs(
        tokens=jnp.asarray(tokens),
        positions=jnp.arange(count, dtype=jnp.int32),
        slots=jnp.arange(count, dtype=jnp.int32),
        page_table=jnp.arange(width, dtype=jnp.int32)[None],
        kv_lens=jnp.array([count], jnp.int32),
        q_starts=jnp.array([0], jnp.int32),
        q_lens=jnp.array([count], jnp.int32),
        max_q_len=count,
    )
    graph, params = nnx.split(model)

    @jax.jit
    def run(params: Any, inputs: StepInputs, cache: Any, positions: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        hidden, _ = model(inputs, cache)
        return model.logits(hidden[positions])

    cache = model.new_cache(width, PAGE, **cache_options)
    return np.asarray(run(params, inputs, cache, positions))


PROMPTS = [
    ("demo", "raw"),
    ("demo", "raw_long"),
    ("tiny", "short"),
    ("tiny", "long"),
    ("tiny_dense_tied", "short"),
    ("tiny_dense_tied", "long"),
]


@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_float32_logits(directories: dict[str, Path], name: str, prompt: str) -> None:
    data, model = golden(name), loaded(directories[name], "float32").model
    got = logits_of(model, data[f"{prompt}.tokens"], data[f"{prompt}.positions"])
    want = data[f"{prompt}.logits"]
    assert np.abs(want).max() > 1, "logits without spread would prove nothing"
    assert_close(got, want, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "prompt"), [("demo", "raw_long"), ("tiny", "long"), ("tiny_dense_tied", "long")]
)
def test_bf16_logits(directories: dict[str, Path], name: str, prompt: str) -> None:
    """As near to float32 as transformers' own bf16 run is, at the typical position.

    At single positions bf16 rounding flips the choice between two experts of nearly equal
    score, in either run and not in the same places: those move a whole row of logits.
    """
    data, model = golden(name), loaded(directories[name], "bfloat16").model
    got = logits_of(model, data[f"{prompt}.tokens"], data[f"{prompt}.positions"])
    want, theirs = data[f"{prompt}.logits"], data[f"{prompt}.logits_bf16"]

    def typical_error(logits: np.ndarray) -> float:
        return float(np.median(np.sqrt(np.mean((logits - want) ** 2, axis=1))))

    assert typical_error(got) <= 1.25 * typical_error(theirs)
    assert cosine(got, want) >= 0.998


@pytest.mark.parametrize("prompt", ["short", "long"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_fp8_logits(directories: dict[str, Path], prompt: str, dtype: str) -> None:
    """fp8 experts with quantised activations, against the dequantised weights in float32."""
    data, model = golden("tiny_fp8"), loaded(directories["tiny_fp8"], dtype).model
    assert model.layers[0].mlp.experts.gate_up.dtype == jnp.float8_e4m3fn
    assert model.layers[0].self_attn.qkv_proj.weight.dtype == jnp.dtype(dtype)
    got = logits_of(model, data[f"{prompt}.tokens"], data[f"{prompt}.positions"])
    assert cosine(got, data[f"{prompt}.logits"]) >= 0.995


def agreeing_steps(got: np.ndarray, want: np.ndarray, margins: np.ndarray) -> int:
    """Steps before the first one that may go either way; tokens must agree until there."""
    clear = margins >= MARGIN
    steps = len(want) if clear.all() else int(np.argmin(clear))
    np.testing.assert_array_equal(got[:steps], want[:steps])
    return steps


@pytest.mark.parametrize(
    ("name", "prompt"),
    [("demo", "raw"), ("demo", "chat"), ("tiny", "short"), ("tiny_dense_tied", "short")],
)
def test_greedy_tokens(directories: dict[str, Path], name: str, prompt: str) -> None:
    data = golden(name)
    generator = Generator(loaded(directories[name], "float32").model, page_size=PAGE)
    bursts = generator.stream([data[f"{prompt}.tokens"].tolist()], max_new_tokens=96)
    got = np.concatenate([burst.tokens[:, 0] for burst in bursts])[:96]
    steps = agreeing_steps(got, data[f"{prompt}.greedy"], data[f"{prompt}.margins"])
    assert steps >= 64, f"only {steps} steps have a clear winner: choose another prompt"


def test_chat_template_gives_the_recorded_prompt(directories: dict[str, Path]) -> None:
    manifest = json.loads((GOLDEN / "manifest.json").read_text())
    tokenizer = loaded(directories["demo"], "float32").tokenizer
    for name, prompt in manifest["demo"]["prompts"].items():
        text = prompt["text"]
        if prompt["chat"]:
            tokens = tokenizer.encode_chat([{"role": "user", "content": text}])
        else:
            tokens = tokenizer.encode(text)
        assert tokens == golden("demo")[f"{name}.tokens"].tolist()


HF = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 128,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e6,
    "max_position_embeddings": 128,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 2,
}


def test_config_from_hugging_face() -> None:
    config = Qwen3MoEConfig.from_hf(HF)
    assert config.sparse_layers == (False, False, False, True)
    assert (config.rope_theta, config.rms_eps, config.window) == (5e6, 1e-5, None)
    windowed = HF | {"use_sliding_window": True, "sliding_window": 16}
    assert Qwen3MoEConfig.from_hf(windowed).window == 16
    renamed = ("head_dim", "rope_theta", "num_experts")
    new_style = {key: value for key, value in HF.items() if key not in renamed} | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 7e5},
        "num_local_experts": 8,
    }
    config = Qwen3MoEConfig.from_hf(new_style)
    assert (config.head_dim, config.rope_theta, config.num_experts) == (16, 7e5, 8)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"attention_bias": True},
            NotImplementedError,
            "'attention_bias' must be False, got True",
        ),
        ({"hidden_act": "gelu"}, NotImplementedError, "'hidden_act' must be 'silu', got 'gelu'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            NotImplementedError,
            "rope_type must be 'default', got 'yarn'",
        ),
        ({"num_experts": None}, ValueError, "config.json has no 'num_experts' or 'num_local_exp"),
        ({"rope_theta": None}, ValueError, "config.json has no 'rope_theta'"),
    ],
)
def test_config_refusals(change: dict[str, Any], error: type[Exception], words: str) -> None:
    values = {key: value for key, value in (HF | change).items() if value is not None}
    with pytest.raises(error, match=f"Qwen3-MoE: .*{words}"):
        Qwen3MoEConfig.from_hf(values)


def test_bytes_per_step_counts_what_is_read() -> None:
    model = tiny_models.qwen3_moe(jnp.bfloat16)
    config = model.config
    sizes = {
        "/".join(map(str, path)): leaf[...].nbytes
        for path, leaf in nnx.to_flat_state(nnx.split(model)[1])
    }
    experts = sum(n for path, n in sizes.items() if "/experts/" in path)
    skipped = sum(n for path, n in sizes.items() if "embed" in path or "cos_sin" in path)
    rest = sum(sizes.values()) - experts - skipped
    one = model.bytes_per_step(batch=1, kv_len=0, kv_itemsize=2)
    assert one == rest + experts * config.experts_per_token // config.num_experts
    many = model.bytes_per_step(batch=1000, kv_len=10, kv_itemsize=1)
    kv = 2 * config.num_layers * 1000 * 10 * config.num_kv_heads * config.head_dim
    assert many == rest + experts + kv
    scaled = model.bytes_per_step(1000, 10, 1, k_scales_per_token=True)
    assert scaled - many == 4 * config.num_layers * 1000 * 10 * config.num_kv_heads


def test_dynamic_k_scales_follow_the_keys(rng: np.random.Generator) -> None:
    """Keys far beyond e4m3's range saturate at a static scale of 1, not at their own scales."""
    model = tiny_models.qwen3_moe(num_layers=1, sparse_layers=(True,))
    attention = model.layers[0].self_attn
    attention.k_norm[...] = attention.k_norm[...] * 4000
    attention.scale = 1 / 4000
    prompt, positions = rng.integers(0, 96, 40), np.arange(40)
    fp8 = dict(dtype=jnp.float8_e4m3fn)
    exact = logits_of(model, prompt, positions)
    static = logits_of(model, prompt, positions, **fp8)
    dynamic = logits_of(model, prompt, positions, **fp8, k_scales_per_token=True)
    near, far = (float(np.linalg.norm(logits - exact)) for logits in (dynamic, static))
    assert 0 < near < 0.25 * far, (near, far)
    assert cosine(dynamic, exact) > 0.98

    made = []

    def new_cache(*arguments: Any, **options: Any) -> Any:
        made.append(Qwen3MoE.new_cache(model, *arguments, **options))
        return made[-1]

    model.new_cache = new_cache
    runner = Generator(model, burst=4, kv_cache_dtype=jnp.float8_e4m3fn, k_scales_per_token=True)
    bursts = list(runner.stream([prompt.tolist(), [5]], max_new_tokens=6))
    tokens = np.concatenate([burst.tokens for burst in bursts])[:6]
    assert tokens.shape == (6, 2) and ((tokens >= 0) & (tokens < 96)).all()
    assert [layer.k_scale_pages is not None for layer in made[0].layers] == [True]


def test_inactive_rows_cost_no_expert() -> None:
    """Rows without a slot get no expert and no place in the cache, and leave the others alone."""
    model = tiny_models.qwen3_moe()
    inputs = StepInputs(
        tokens=jnp.array([3, 4, 5], jnp.int32),
        positions=jnp.zeros(3, jnp.int32),
        slots=jnp.array([0, -1, 128], jnp.int32),
        page_table=jnp.array([[0], [1], [2]], jnp.int32),
        kv_lens=jnp.array([1, 0, 1], jnp.int32),
    )
    full = dataclasses.replace(
        inputs, slots=jnp.array([0, 64, 128], jnp.int32), kv_lens=jnp.ones(3, jnp.int32)
    )
    run = nnx.jit(lambda model, inputs, cache: model(inputs, cache))
    hidden, cache = run(model, inputs, model.new_cache(3))
    want, _ = run(model, full, model.new_cache(3))
    np.testing.assert_array_equal(np.asarray(hidden)[[0, 2]], np.asarray(want)[[0, 2]])
    assert all(not np.asarray(layer.k_pages[1]).any() for layer in cache.layers)
