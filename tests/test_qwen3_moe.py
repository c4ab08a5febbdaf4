"""Qwen3-MoE: its configuration, what a step reads, and dynamic scales of K."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_hpc.generate import Generator
from jax_hpc.models import Qwen3MoE, Qwen3MoEConfig
from jax_hpc.step import StepInputs
from tests.support import tiny_models
from tests.support.golden_runs import logits_of
from tests.support.numerics import cosine

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
        (
            {"num_hidden_layers": "4"},
            ValueError,
            "config.json key 'num_hidden_layers' must be an integer >= 1, got '4'",
        ),
        ({"num_attention_heads": 0}, ValueError, "'num_attention_heads' .* >= 1, got 0"),
        ({"rms_norm_eps": True}, ValueError, "'rms_norm_eps' must be a number above 0, got True"),
        ({"norm_topk_prob": 1}, ValueError, "'norm_topk_prob' must be true or false, got 1"),
        ({"mlp_only_layers": 3}, ValueError, "'mlp_only_layers' must be a list, got 3"),
        ({"rope_parameters": "default"}, ValueError, "'rope_parameters' must be an object"),
    ],
)
def test_config_refusals(change: dict[str, Any], error: type[Exception], words: str) -> None:
    values = {key: value for key, value in (HF | change).items() if value is not None}
    with pytest.raises(error, match=f"Qwen3-MoE: .*{words}"):
        Qwen3MoEConfig.from_hf(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 3}, "'num_q_heads' must be a multiple of num_kv_heads = 2"),
        (
            {"num_experts_per_tok": 9},
            "'experts_per_token' must be from 1 to num_experts = 8, got 9",
        ),
    ],
)
def test_sizes_that_contradict_each_other(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"Qwen3MoEConfig: argument {words}"):
        Qwen3MoEConfig.from_hf(HF | change)


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
