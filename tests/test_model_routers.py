"""The routers of whole models choose as a float64 router does."""

from pathlib import Path

import numpy as np
import pytest

from jax_hpc.loading import load_model
from jax_hpc.models.decoder import SparseMLP
from tests.support import golden_checkpoints as recipes
from tests.support.golden_runs import golden, prefill_inputs, write_tiny

ROUTERS = {"tiny": "gate.weight", "tiny_hy3": "router.gate.weight"}
"""The router's tensor of a sparse layer: of Qwen3-MoE (softmax) and of Hy3 (sigmoid and bias)."""


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float32", pytest.param("bfloat16", id="kernels", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("name", ROUTERS)
def test_router_chooses_as_a_float64_router(tmp_path: Path, name: str, dtype: str) -> None:
    """Given the layer's own input, wherever the scores' k-th gap exceeds twice their bound."""
    recipe = recipes.RECIPES[name]
    tensors = recipes.make_tensors(recipe)
    model = load_model(write_tiny(tmp_path, name), dtype=dtype, progress=False).model
    tokens = golden(name)["long.tokens"]
    inputs, cache = prefill_inputs(tokens), model.new_cache(3)
    x, clear, rows = model.embed_tokens(inputs.tokens), 0, 0
    for index, layer in enumerate(model.layers):
        y = layer.input_layernorm(x)
        x = x + layer.self_attn(y, inputs, cache.layers[index], model.cos_sin[...])[0]
        y = layer.post_attention_layernorm(x)
        if isinstance(layer.mlp, SparseMLP):
            ids = np.asarray(layer.mlp.gate(y, inputs.active).ids)
            scores, bound = scores64(tensors, f"model.layers.{index}.mlp", name, np.asarray(y))
            clear += assert_same_choice(scores, bound, ids)
            rows += len(tokens)
        x = x + layer.feed_forward(y, inputs.active)
    assert rows and clear >= 0.99 * rows, "hardly a choice is clear: nothing was tested"


def scores64(
    tensors: recipes.Tensors, layer: str, name: str, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What orders the experts ``[T, E]``, and how far the operator's may be from it ``[T]``."""
    x64 = x.astype(np.float64)
    weight = tensors[f"{layer}.{ROUTERS[name]}"].astype(np.float64)
    logits = x64 @ weight.T
    bound = 2.0**-16 * (np.abs(x64) @ np.abs(weight).T).max(axis=1)
    if name == "tiny":
        return logits, bound
    # A sigmoid's slope is 1/4 at most.
    bias = tensors[f"{layer}.expert_bias"].astype(np.float64)
    return 1 / (1 + np.exp(-logits)) + bias, bound / 4


def assert_same_choice(scores: np.ndarray, bound: np.ndarray, ids: np.ndarray) -> int:
    """Compares the rows whose choice is clear, and counts them."""
    k = ids.shape[1]
    order = np.argsort(-scores, axis=1, kind="stable")
    kth, next_best = (np.take_along_axis(scores, order[:, i : i + 1], 1)[:, 0] for i in (k - 1, k))
    clear = kth - next_best > 2 * bound
    np.testing.assert_array_equal(
        np.sort(ids, axis=1)[clear], np.sort(order[:, :k], axis=1)[clear]
    )
    return int(clear.sum())
