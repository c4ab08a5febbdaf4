"""router_topk is router_gemm and route_topk in one: results, checks, and what its handler gets."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_hpc
from jax_hpc import SplitWeight, _registry, route_topk, router_gemm, router_topk
from jax_hpc.ops.route_topk.signature import Params as RouteParams
from jax_hpc.ops.router_topk import heuristics, reference
from jax_hpc.ops.router_topk.cases import CASES, Case
from jax_hpc.ops.router_topk.primitive import KERNEL
from jax_hpc.ops.router_topk.signature import Operands, Params
from tests.support.numerics import assert_bitwise


def operands(rng: np.random.Generator, tokens: int, hidden: int, experts: int) -> Any:
    x = jnp.asarray(rng.normal(0, 1, (tokens, hidden)).astype(ml_dtypes.bfloat16))
    w = jnp.asarray(rng.normal(0, 0.1, (experts, hidden)).astype(np.float32))
    bias = jnp.asarray(rng.normal(0, 0.01, experts).astype(np.float32))
    return x, jax_hpc.split_router_weight(w), bias


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_is_the_two_calls(rng: np.random.Generator, case: Case) -> None:
    choice = case.choice
    x, weight, bias = operands(rng, 6, 64, choice.experts)
    bias = bias if choice.has_bias else None
    got = router_topk(x, weight, choice.k, bias=bias, **choice.options)
    logits = router_gemm(x, weight)
    want = route_topk(logits, choice.k, bias=bias, **choice.options)
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, b)


def test_the_truth_chooses_the_same_experts(rng: np.random.Generator) -> None:
    x, weight, bias = operands(rng, 5, 128, 32)
    got = router_topk(x, weight, 4, bias=bias, renormalize=True, scale=2.0)
    route = RouteParams(4, "softmax", True, 2.0, 0, 1, 1)
    want = jax.jit(reference.router_topk, static_argnums=1)(
        Operands(x, weight, bias), Params(route)
    )
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-4)


def test_models_that_have_both_halves() -> None:
    assert {case.name for case in CASES} == {"hy3", "qwen3", "longcat", "longcat-lite"}
    assert all(case.product.experts == case.choice.experts for case in CASES)


def test_vmap_folds_into_tokens(rng: np.random.Generator) -> None:
    x, weight, bias = operands(rng, 12, 32, 16)
    call = functools.partial(router_topk, weight=weight, k=2, bias=bias)
    got = jax.vmap(lambda x: call(x))(x.reshape(3, 4, 32))
    for a, b in zip(got, call(x), strict=True):
        assert_bitwise(a, np.asarray(b).reshape(a.shape))
    with pytest.raises(NotImplementedError, match="vmap over argument 'bias' .*only x may"):
        jax.vmap(lambda b: router_topk(x, weight, 2, bias=b))(jnp.zeros((3, 16)))


@pytest.mark.parametrize("tokens", [0, 1])
def test_edge_sizes(tokens: int) -> None:
    weight = jax_hpc.split_router_weight(jnp.ones((1, 3)))
    got = router_topk(jnp.ones((tokens, 3), jnp.bfloat16), weight, 1)
    np.testing.assert_array_equal(got.ids, np.zeros((tokens, 1), np.int32))
    np.testing.assert_array_equal(got.weights, np.ones((tokens, 1), np.float32))
    assert got.identity_weight.shape == (tokens,)


def lower(x: Any, weight: Any, bias: Any, **options: Any) -> str:
    def call(x: jax.Array, weight: SplitWeight, bias: jax.Array | None) -> Any:
        return router_topk(x, weight, bias=bias, **options)

    traced = jax.jit(call).trace(x, weight, bias)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_full", [False, True])
def test_what_the_handler_is_given(
    monkeypatch: pytest.MonkeyPatch, with_bias: bool, with_full: bool
) -> None:
    """Activations, parts and bias; results, then the logits as a workspace."""
    monkeypatch.setattr(_registry, "unusable_reason", lambda: None)
    x = shape(5, 64, dtype=jnp.bfloat16)
    parts = shape(2, 12, 64, dtype=jnp.bfloat16)
    weight = SplitWeight(parts, shape(12, 64) if with_full else None)
    bias = shape(12) if with_bias else None
    text = lower(x, weight, bias, k=np.int64(3), scale=np.float64(6), num_zero_experts=4)
    call = next(line for line in text.splitlines() if "@jax_hpc.router_topk.v1" in line)
    for attribute in ("k = 3 : i32", "scale = 6.000000e+00 : f32", "pdl = true"):
        assert attribute in call, call
    given = "tensor<5x64xbf16>, tensor<2x12x64xbf16>" + (", tensor<12xf32>" if with_bias else "")
    results = "tensor<5x3xi32>, tensor<5x3xf32>, tensor<5xf32>, tensor<5x12xf32>"
    assert call.rstrip().endswith(f"({given}) -> ({results})"), call


def test_overlap_is_of_few_tokens_and_can_be_switched_off() -> None:
    route = RouteParams(2, "softmax", False, 1.0, 0, 1, 1)
    most = heuristics.MOST_OVERLAPPED_TOKENS

    def overlaps(tokens: int, params: Params) -> object:
        x: Any = shape(tokens, 64, dtype=jnp.bfloat16)
        return KERNEL.attributes(Operands(x, WEIGHT, None), params)["pdl"]

    assert overlaps(most, Params(route)) is True
    assert overlaps(most, Params(route, overlap=False)) is False
    assert overlaps(most + 1, Params(route)) is False


@pytest.mark.parametrize(
    ("experts", "dtype", "words"),
    [
        (16, jnp.float32, "x must be bfloat16, got float32"),
        (40000, jnp.bfloat16, "at most 32768 experts, got 40000"),
    ],
)
def test_no_kernel(monkeypatch: pytest.MonkeyPatch, experts: int, dtype: Any, words: str) -> None:
    monkeypatch.setattr(_registry, "unusable_reason", lambda: None)
    x, weight = shape(2, 8, dtype=dtype), SplitWeight(shape(1, experts, 8, dtype=jnp.bfloat16))
    with pytest.raises(NotImplementedError, match=f"router_topk: no CUDA kernel .*{words}"):
        lower(x, weight, None, k=2, implementation="cuda")


def test_overlap_ends_where_it_was_measured_to_lose() -> None:
    """The threshold lies between the sizes that gained by it and those that lost."""
    for row in heuristics.MEASURED:
        assert heuristics.overlaps(row.tokens) == (row.overlapped < row.one_after_the_other), row


WEIGHT = SplitWeight(jnp.zeros((2, 12, 64), jnp.bfloat16))
X = jnp.zeros((3, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": X[:, :63]}, ValueError, r"'weight.parts' .* H = 63 from 'x'"),
        ({"x": X.astype(jnp.float16)}, TypeError, "'x' must be bfloat16 or float32"),
        ({"weight": X}, TypeError, "'weight' must be a SplitWeight"),
        ({"bias": jnp.zeros(11)}, ValueError, "'bias' must have shape .*E = 12 from 'weight.p"),
        ({"bias": jnp.zeros(12, jnp.bfloat16)}, TypeError, "'bias' must be float32"),
        ({"k": 13}, ValueError, "'k' must be 1 <= k <= E = 12, got 13"),
        ({"k": True}, TypeError, "'k' must be a Python int"),
        ({"scoring": "tanh"}, ValueError, "'scoring' must be one of 'softmax', 'sigmoid'"),
        ({"num_groups": 5}, ValueError, "'num_groups' must be a divisor of E = 12"),
        ({"implementation": "fast"}, ValueError, "'implementation' must be one of 'auto'"),
    ],
)
def test_refuses(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"x": X, "weight": WEIGHT, "k": 2, **change}
    with pytest.raises(error, match=f"router_topk: argument .*{words}"):
        router_topk(**arguments)
