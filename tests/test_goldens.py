"""Models from checkpoints of every layout, against transformers' recorded logits and tokens."""

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc.loading import load_model
from tests.support import golden_checkpoints
from tests.support.decoder_truth import Truth
from tests.support.golden_runs import (
    ROOT,
    agreeing_steps,
    golden,
    greedy,
    logits_of,
    manifest,
    write_tiny,
)
from tests.support.numerics import assert_close, cosine

FP8 = jnp.float8_e4m3fn


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo checkpoint, and the tiny ones written from their recipes."""
    tiny = {n: write_tiny(tmp_path_factory.mktemp(n), n) for n in golden_checkpoints.RECIPES}
    return {"demo": ROOT / "models" / "demo_checkpoint"} | tiny


@functools.cache
def loaded(directory: Path, dtype: str, quantize: Any = None) -> Any:
    return load_model(directory, dtype=dtype, quantize=quantize, progress=False)


def unquantised(directories: dict[str, Path], name: str) -> Any:
    """The model in float32; transformers computed fp8 checkpoints on dequantised weights too."""
    return loaded(directories[name], "float32", "none" if "fp8" in name else None).model


PROMPTS = [
    ("demo", "raw"),
    ("demo", "raw_long"),
    ("tiny", "short"),
    ("tiny", "long"),
    ("tiny_dense_tied", "short"),
    ("tiny_dense_tied", "long"),
    ("tiny_fp8", "long"),
    ("tiny_qwen3", "long"),
    ("tiny_qwen3_fp8", "long"),
    ("tiny_hy3", "long"),
    ("tiny_hy3_fp8", "long"),
]


@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_float32_logits(directories: dict[str, Path], name: str, prompt: str) -> None:
    data, model = golden(name), unquantised(directories, name)
    got = logits_of(model, data[f"{prompt}.tokens"], data[f"{prompt}.positions"])
    want = data[f"{prompt}.logits"]
    assert np.abs(want).max() > 1, "logits without spread would prove nothing"
    # An eps of 1e-6 in place of Hy3's 1e-5 moves them by 7e-5.
    assert_close(got, want, atol=3e-5 if "hy3" in name else 1e-4)


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("demo", "raw_long"),
        ("tiny", "long"),
        ("tiny_dense_tied", "long"),
        ("tiny_qwen3", "long"),
        ("tiny_hy3", "long"),
    ],
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


@pytest.mark.parametrize("name", ["tiny_fp8", "tiny_qwen3_fp8", "tiny_hy3_fp8"])
def test_fp8_logits(directories: dict[str, Path], name: str) -> None:
    """As loaded: fp8 with quantised activations, but linear layers in blocks dequantised. In
    float32 against the same quantisation points in float64, and in both dtypes against the
    dequantised weights."""
    data, recipe = golden(name), golden_checkpoints.RECIPES[name]
    prompt = data["long.tokens"], data["long.positions"]
    truth = Truth(recipe, golden_checkpoints.make_tensors(recipe), quantized=True)
    same_points = truth.logits(prompt[0])[prompt[1]]
    for dtype in ("float32", "bfloat16"):
        model = loaded(directories[name], dtype).model
        if recipe.family != "qwen3":
            assert model.layers[-1].mlp.experts.gate_up.dtype == FP8
        held = FP8 if recipe.fp8 == "tensor" else jnp.dtype(dtype)
        assert model.layers[0].self_attn.qkv_proj.weight.dtype == held
        got = logits_of(model, *prompt)
        assert cosine(got, data["long.logits"]) >= 0.995
        if dtype == "float32":
            assert cosine(got, same_points) >= 0.9999


@pytest.mark.parametrize(
    ("family", "fp8"),
    [("qwen3", "tensor"), ("qwen3_moe", "tensor"), ("hy_v3", "block")],
)
def test_every_family_loads_every_format(tmp_path: Path, family: Any, fp8: Any) -> None:
    """Also where no golden is: against the same quantisation points in float64."""
    like = golden_checkpoints.HY3 if family == "hy_v3" else {}
    changes = like | {"family": family, "fp8": fp8, "layers": 2 if like else 1, "shards": 1}
    recipe = golden_checkpoints.Recipe(seed=7, **changes)
    tensors = golden_checkpoints.make_tensors(recipe)
    config = golden_checkpoints.make_config(recipe)
    directory = golden_checkpoints.write_files(tmp_path, config, tensors, recipe.shards)
    tokens = golden("tiny")["short.tokens"]
    want = Truth(recipe, tensors, quantized=True).logits(tokens)
    got = logits_of(loaded(directory, "float32").model, tokens, np.arange(len(tokens)))
    assert cosine(got, want) >= 0.9999


@pytest.mark.parametrize("name", ["tiny_fp8", "tiny_qwen3_fp8", "tiny_hy3_fp8"])
def test_the_float64_model_is_transformers_on_dequantised_weights(name: str) -> None:
    """So that the quantised truth differs from transformers by its quantisation points alone."""
    data, recipe = golden(name), golden_checkpoints.RECIPES[name]
    truth = Truth(recipe, golden_checkpoints.make_tensors(recipe))
    got = truth.logits(data["long.tokens"])[data["long.positions"]]
    assert_close(got, data["long.logits"], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("demo", "raw"),
        ("demo", "chat"),
        ("tiny", "short"),
        ("tiny_dense_tied", "short"),
        ("tiny_fp8", "short"),
        ("tiny_qwen3", "short"),
        ("tiny_qwen3_fp8", "short"),
        ("tiny_hy3", "short"),
        ("tiny_hy3_fp8", "short"),
    ],
)
def test_greedy_tokens(directories: dict[str, Path], name: str, prompt: str) -> None:
    data = golden(name)
    got = greedy(unquantised(directories, name), data[f"{prompt}.tokens"], 96)
    steps = agreeing_steps(got, data[f"{prompt}.greedy"], data[f"{prompt}.margins"])
    assert steps >= 64, f"only {steps} steps have a clear winner: choose another prompt"


def test_fp8_cache_gives_the_tokens_of_a_bf16_cache(directories: dict[str, Path]) -> None:
    data, model = golden("demo"), loaded(directories["demo"], "bfloat16").model
    prompt, margins = data["raw.tokens"], data["raw.margins"]
    want = greedy(model, prompt, 96, kv_cache_dtype=jnp.bfloat16)
    got = greedy(model, prompt, 96, kv_cache_dtype=FP8)
    assert agreeing_steps(got, want, margins) >= 64


def test_chat_template_gives_the_recorded_prompt(directories: dict[str, Path]) -> None:
    tokenizer = loaded(directories["demo"], "float32").tokenizer
    for name, prompt in manifest()["demo"]["prompts"].items():
        text = prompt["text"]
        if prompt["chat"]:
            tokens = tokenizer.encode_chat([{"role": "user", "content": text}])
        else:
            tokens = tokenizer.encode(text)
        assert tokens == golden("demo")[f"{name}.tokens"].tolist()
