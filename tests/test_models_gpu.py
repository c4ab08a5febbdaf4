"""Whole models on a GPU, with the kernels that "auto" takes: every operator, layers, tokens."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_hpc import Implementations, _primitive
from jax_hpc.cache import PagedKVCache, pages_for
from jax_hpc.decode import compiler_options
from jax_hpc.loading import load_model
from jax_hpc.models.decoder import SparseMLP
from jax_hpc.step import StepInputs
from tests.support.golden_runs import (
    PAGE,
    ROOT,
    agreeing_steps,
    golden,
    greedy,
    prefill_inputs,
    write_tiny,
)
from tests.support.numerics import cosine

pytestmark = [
    pytest.mark.gpu,
    # All of these shapes fit the kernels.
    pytest.mark.filterwarnings("error::jax_hpc.types.FallbackWarning"),
]

FP8 = jnp.float8_e4m3fn
XLA = Implementations(attention="xla", moe="xla", router="xla", norm="xla")


@pytest.fixture(autouse=True)
def _warnings_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fallback is told once in a process."""
    monkeypatch.setattr(_primitive, "_WARNED", set())


def load(directory: Path, **options: Any) -> Any:
    return load_model(directory, dtype="bfloat16", progress=False, **options).model


def walk(
    models: list[Any], inputs: StepInputs, cache: PagedKVCache
) -> tuple[dict[str, list[jax.Array]], jax.Array]:
    """What each part of each layer gives in all models on the input of the first, whose logits."""
    first, x = models[0], models[0].embed_tokens(inputs.tokens)
    parts: dict[str, list[jax.Array]] = {}
    for index, pages in enumerate(cache.layers):
        layers = [model.layers[index] for model in models]
        y = layers[0].input_layernorm(x)
        parts[f"{index} norm"] = [layer.input_layernorm(x) for layer in layers]
        table = first.cos_sin[...]
        attended = [layer.self_attn(y, inputs, pages, table)[0] for layer in layers]
        parts[f"{index} attention"] = attended
        x = x + attended[0]
        y = layers[0].post_attention_layernorm(x)
        if isinstance(layers[0].mlp, SparseMLP):
            routes = [layer.mlp.gate(y, inputs.active).ids for layer in layers]
            parts[f"{index} ids"] = routes
        outputs = [layer.feed_forward(y, inputs.active) for layer in layers]
        parts[f"{index} mlp"] = outputs
        x = x + outputs[0]
    return parts, first.logits(first.norm(x))


def run_walk(
    directory: Path, tokens: np.ndarray, kv: Any
) -> tuple[dict[str, list[jax.Array]], jax.Array, str]:
    """:func:`walk` with kernels and in XLA's forms, and the program's text."""
    model = load(directory)
    graphs = [nnx.split(m)[0] for m in (model, load(directory, implementations=XLA))]
    params = nnx.split(model)[1]

    @jax.jit
    def run(params: Any, inputs: StepInputs, cache: PagedKVCache) -> Any:
        return walk([nnx.merge(graph, params) for graph in graphs], inputs, cache)

    cache = model.new_cache(pages_for(len(tokens), PAGE), PAGE, kv)
    lowered = run.lower(params, prefill_inputs(tokens), cache)
    compiled = lowered.compile(compiler_options(model))
    parts, logits = compiled(params, prefill_inputs(tokens), cache)
    return parts, logits, lowered.as_text()


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("tiny", jnp.bfloat16),
        ("tiny", FP8),
        ("tiny_fp8", jnp.bfloat16),
        ("tiny_hy3", jnp.bfloat16),
        ("tiny_hy3_fp8", jnp.bfloat16),
        ("tiny_hy3_fp8", FP8),
    ],
)
def test_layers_with_kernels_and_in_xlas_form(tmp_path: Path, name: str, kv: Any) -> None:
    """The same quantisation points give the same, and logits are near those of plain weights.

    An fp8 cache has probabilities in e4m3 too; and what attention gives is quantised for a static
    fp8 projection, where a last bit can become a step of e4m3.
    """
    data = golden(name)
    parts, logits, text = run_walk(write_tiny(tmp_path, name), data["long.tokens"], kv)
    for operator in ("prefill_attention", "qk_norm_rope_append", "rms_norm", "fused_moe"):
        assert f"@jax_hpc.{operator}.v1" in text
    assert "@jax_hpc.router" in text
    again = kv == FP8 or name == "tiny_hy3_fp8"
    for part, (got, want) in parts.items():
        if part.endswith("ids"):
            np.testing.assert_array_equal(np.sort(got, axis=1), np.sort(want, axis=1))
        else:
            least = 0.998 if again and part.endswith("attention") else 0.9999
            assert cosine(got, want) >= least, part
    rows = zip(np.asarray(logits)[data["long.positions"]], data["long.logits"], strict=True)
    # In one row the choice between two experts of nearly equal score may turn.
    cosines = sorted(cosine(got, want) for got, want in rows)
    assert cosines[1] >= (0.995 if "fp8" in name else 0.998)


@pytest.mark.parametrize("kv", [jnp.bfloat16, FP8], ids=["bf16", "fp8"])
def test_greedy_tokens(kv: Any) -> None:
    """Those of transformers in float32, with a bf16 cache as with an fp8 cache.

    Its margins are 0.6 at least, and logits move by 0.1 there.
    """
    data, model = golden("demo"), load(ROOT / "models" / "demo_checkpoint")
    got = greedy(model, data["raw.tokens"], 96, kv_cache_dtype=kv)
    assert agreeing_steps(got, data["raw.greedy"], data["raw.margins"]) >= 64
