"""router_topk's handler on a GPU: the two calls' bits, with and without overlap, in graphs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_hpc import RouteResult, route_topk, router_gemm, router_topk, split_router_weight
from jax_hpc.ops.route_topk.signature import Params as RouteParams
from jax_hpc.ops.router_topk import heuristics
from jax_hpc.ops.router_topk.cases import CASES, Case
from jax_hpc.ops.router_topk.primitive import OPERATOR
from jax_hpc.ops.router_topk.signature import Operands, Params
from tests.support.numerics import assert_bitwise
from tests.support.route_check import assert_route

pytestmark = pytest.mark.gpu

cuda = functools.partial(router_topk, implementation="cuda")


def operands(
    rng: np.random.Generator, tokens: int, hidden: int, experts: int, terms: int = 2
) -> Any:
    x = jnp.asarray(rng.normal(0, 1, (tokens, hidden)).astype(ml_dtypes.bfloat16))
    w = jnp.asarray(rng.normal(0, 0.05, (experts, hidden)).astype(np.float32))
    bias = jnp.asarray(rng.normal(0, 0.01, experts).astype(np.float32))
    return x, split_router_weight(w, terms), bias


def two_calls(x: jax.Array, weight: Any, k: int, **options: Any) -> RouteResult:
    logits = router_gemm(x, weight, implementation="cuda")
    return route_topk(logits, k, implementation="cuda", **options)


def assert_same(got: RouteResult, want: RouteResult) -> None:
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("tokens", [1, 8, 64, 129, 1000, 4096])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_models(rng: np.random.Generator, case: Case, tokens: int) -> None:
    product, choice = case.product, case.choice
    x, weight, bias = operands(rng, tokens, product.hidden, product.experts)
    options = {"bias": bias if choice.has_bias else None, **choice.options}
    got = cuda(x, weight, choice.k, **options)
    assert_same(got, two_calls(x, weight, choice.k, **options))
    for _ in range(3):
        assert_same(cuda(x, weight, choice.k, **options), got)
    logits = np.asarray(router_gemm(x, weight, implementation="cuda"))
    bias = np.asarray(bias) if choice.has_bias else None
    assert_route(got, logits, choice.k, bias=bias, **choice.options)


@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 8, 1), (5, 123, 19), (70, 520, 257), (3, 64, 2000)])
def test_shapes(rng: np.random.Generator, shape: tuple[int, int, int], terms: int) -> None:
    x, weight, bias = operands(rng, *shape, terms)
    k = min(7, shape[2])
    assert_same(cuda(x, weight, k, bias=bias), two_calls(x, weight, k, bias=bias))


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 1024), (16, 1024), (128, 1024), (70, 1023)])
def test_overlap_changes_no_bit(rng: np.random.Generator, tokens: int, hidden: int) -> None:
    """Eagerly and in a loop of graphs whose calls follow each other, over many inputs."""
    assert heuristics.overlaps(tokens), "with more tokens there is nothing to switch off"
    x, weight, bias = operands(rng, tokens, hidden, 192)
    route = RouteParams(8, "sigmoid", True, 2.5, 0, 1, 1)

    def run(x: jax.Array, overlap: bool) -> RouteResult:
        params = Params(route, overlap)
        return OPERATOR(Operands(x, weight, bias), params, implementation="cuda")

    def step(overlap: bool, index: Any, carry: jax.Array) -> jax.Array:
        del index
        for _ in range(6):
            result = run(carry, overlap)
            change = (
                result.weights.sum(1, keepdims=True) + result.ids[:, :1].astype(jnp.float32) * 0.01
            )
            carry = (carry.astype(jnp.float32) + jnp.sin(change)).astype(carry.dtype)
        return carry

    assert_same(run(x, True), run(x, False))
    loops = [
        jax.jit(lambda x, on=overlap: jax.lax.fori_loop(0, 20, functools.partial(step, on), x))
        for overlap in (True, False)
    ]
    want = loops[1](x)
    for _ in range(5):
        assert_bitwise(loops[0](x), want)


def test_vmap_and_empty_batches(rng: np.random.Generator) -> None:
    x, weight, bias = operands(rng, 12, 64, 40)
    got = jax.vmap(lambda x: cuda(x, weight, 3, bias=bias))(x.reshape(3, 4, 64))
    for a, b in zip(got, cuda(x, weight, 3, bias=bias), strict=True):
        assert_bitwise(a, np.asarray(b).reshape(a.shape))
    assert cuda(x[:0], weight, 3).ids.shape == (0, 3)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("terms", [2, 3])
@pytest.mark.parametrize("shape", [(9, 128, 48), (9, 123, 48), (3000, 520, 160)])
def test_a_bad_row_stays_its_own(
    rng: np.random.Generator, shape: tuple[int, int, int], terms: int, bad: float
) -> None:
    x, weight, _ = operands(rng, *shape, terms)
    want = cuda(x, weight, 4)
    got = cuda(x.at[5, 100].set(bad), weight, 4)
    if np.isnan(bad):
        np.testing.assert_array_equal(got.ids[5], np.arange(4))
        np.testing.assert_array_equal(got.weights[5], np.zeros(4))
    for a, b in zip(got, want, strict=True):
        assert_bitwise(np.delete(a, 5, 0), np.delete(b, 5, 0))


def test_float32_has_no_kernel() -> None:
    weight = split_router_weight(jnp.ones((4, 16)))
    with pytest.raises(NotImplementedError, match="router_topk: .*x must be bfloat16, got float"):
        cuda(jnp.ones((2, 16)), weight, 2)
