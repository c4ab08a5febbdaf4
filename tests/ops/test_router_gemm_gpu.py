"""The router_gemm kernel on a GPU: bounds against float64, edges, repeats, graphs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import SplitWeight, router_gemm, split_router_weight
from tests.support.numerics import assert_bitwise, assert_close
from tests.support.router_products import (
    BOUNDS,
    LONG_SHAPES,
    MOST_HIDDEN_OF_THREE_TERMS,
    SHAPES,
    Product,
    constant_product,
    random_product,
)

pytestmark = pytest.mark.gpu

cuda = functools.partial(router_gemm, implementation="cuda")


def name_of(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def has_kernel(shape: tuple[int, int, int], terms: int) -> bool:
    return terms < 3 or shape[1] <= MOST_HIDDEN_OF_THREE_TERMS


def assert_within_bound(product: Product, terms: int) -> None:
    """The bound for every logit, and the same bits again."""
    got = cuda(product.x, product.weight)
    assert_close(got, product.want, atol=BOUNDS[terms] * product.magnitude)
    for _ in range(3):
        assert_bitwise(cuda(product.x, product.weight), got)


@pytest.mark.parametrize(
    ("shape", "terms"),
    [(shape, terms) for shape in SHAPES for terms in (1, 2, 3) if has_kernel(shape, terms)],
    ids=name_of,
)
def test_bound(rng: np.random.Generator, shape: tuple[int, int, int], terms: int) -> None:
    for positive in (False, True):
        assert_within_bound(random_product(rng, shape, terms, positive), terms)


@pytest.mark.parametrize("kind", ["normal", "positive", "constant"])
@pytest.mark.parametrize("shape", LONG_SHAPES, ids=name_of)
def test_three_terms_of_a_long_axis(
    rng: np.random.Generator, shape: tuple[int, int, int], kind: str
) -> None:
    if kind == "constant":
        assert_within_bound(constant_product(rng, shape, 3), 3)
    else:
        assert_within_bound(random_product(rng, shape, 3, kind == "positive"), 3)


# Each kernel, and tiles of 64 and of 128 tokens.
KINDS = [(5, 2048, 48), (12, 256, 48), (200, 256, 48), (12, 123, 40), (3000, 520, 160)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("terms", [2, 3])
@pytest.mark.parametrize("shape", KINDS, ids=name_of)
def test_a_bad_row_stays_its_own(
    rng: np.random.Generator, shape: tuple[int, int, int], terms: int, bad: float
) -> None:
    product = random_product(rng, shape, terms)
    want = np.asarray(cuda(product.x, product.weight))
    row = shape[0] - 2
    got = np.asarray(cuda(product.x.at[row, 100].set(bad), product.weight))
    assert not np.isfinite(got[row]).any() and (np.isnan(got[row]).all() or np.isinf(bad))
    assert_bitwise(np.delete(got, row, 0), np.delete(want, row, 0))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("terms", [2, 3])
@pytest.mark.parametrize("shape", KINDS, ids=name_of)
def test_a_bad_expert_stays_its_own(
    rng: np.random.Generator, shape: tuple[int, int, int], terms: int, bad: float
) -> None:
    product = random_product(rng, shape, terms)
    want = np.asarray(cuda(product.x, product.weight))
    expert = shape[2] - 3
    parts = product.weight.parts.at[0, expert, 100].set(bad)
    got = np.asarray(cuda(product.x, SplitWeight(parts)))
    column = got[:, expert]
    assert not np.isfinite(column).any() and (np.isnan(column).all() or np.isinf(bad))
    assert_bitwise(np.delete(got, expert, 1), np.delete(want, expert, 1))


def test_kept_full_weight_and_empty_batches(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(0, 1, (6, 128)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(0, 0.1, (16, 128)), jnp.float32)
    weight, kept = split_router_weight(w), split_router_weight(w, keep_full=True)
    assert_bitwise(cuda(x, kept), cuda(x, weight))
    assert cuda(jnp.zeros((0, 128), jnp.bfloat16), weight).shape == (0, 16)


@pytest.mark.parametrize("tokens", [8, 256])
def test_in_a_loop_of_graphs(rng: np.random.Generator, tokens: int) -> None:
    """Six calls a step, enough for XLA to record a CUDA graph, in a loop with new inputs."""
    product = random_product(rng, (tokens, 512, 96), 2)
    weight = product.weight

    def step(index: jax.Array, carry: jax.Array) -> jax.Array:
        del index
        for _ in range(6):
            logits = cuda(carry, weight)
            carry = (carry + jnp.tanh(logits[:, :1]).astype(carry.dtype)).astype(carry.dtype)
        return carry

    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 4, step, x))
    want = product.x
    for index in range(4):
        want = step(jnp.int32(index), want)
    for _ in range(3):
        assert_bitwise(looped(product.x), want)


def test_float32_has_no_kernel() -> None:
    weight = split_router_weight(jnp.ones((4, 16)))
    with pytest.raises(NotImplementedError, match="router_gemm: .*x must be bfloat16, got float"):
        cuda(jnp.ones((2, 16)), weight)
