"""The router_gemm kernel on a GPU: bounds against float64, edges, repeats, graphs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_hpc import router_gemm, split_router_weight
from tests.support.numerics import assert_bitwise, assert_close

pytestmark = pytest.mark.gpu

BOUNDS = {1: 2.0**-8, 2: 2.0**-16, 3: 2.0**-21}
# Tokens on both sides of every tile boundary, experts and hidden sizes that fill no tile, one
# that is not 16-byte aligned, and the shapes of Hy3 and LongCat-Flash.
SHAPES = [
    (1, 4096, 192),
    (8, 4096, 192),
    (9, 520, 33),
    (16, 64, 7),
    (17, 1000, 70),
    (33, 96, 128),
    (64, 6144, 768),
    (65, 520, 257),
    (128, 72, 1),
    (129, 4096, 192),
    (300, 3072, 384),
    (1000, 512, 100),
    (5, 123, 19),
    (150, 77, 65),
    (1, 1, 1),
    (4099, 256, 96),
    # Long hidden axes: the sums of every kernel are emptied many times.
    (8, 65536, 20),
    (64, 16384, 2112),
    (40, 12289, 1100),
]

cuda = functools.partial(router_gemm, implementation="cuda")


def operands(
    rng: np.random.Generator, shape: tuple[int, int, int], terms: int, positive: bool = False
) -> tuple[np.ndarray, np.ndarray, Any]:
    tokens, hidden, experts = shape
    x = rng.normal(0, 1, (tokens, hidden)).astype(ml_dtypes.bfloat16)
    w = rng.normal(0, 0.1, (experts, hidden)).astype(np.float32)
    if positive:
        x, w = np.abs(x), np.abs(w)
    return x, w, split_router_weight(jnp.asarray(w), terms)


@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_bound(rng: np.random.Generator, shape: tuple[int, int, int], terms: int) -> None:
    for positive in (False, True):
        x, w, weight = operands(rng, shape, terms, positive)
        got = np.asarray(cuda(jnp.asarray(x), weight))
        x64, w64 = x.astype(np.float64), w.astype(np.float64)
        assert_close(got, x64 @ w64.T, atol=BOUNDS[terms] * (np.abs(x64) @ np.abs(w64).T))
        for _ in range(3):
            assert_bitwise(cuda(jnp.asarray(x), weight), got)


def test_a_nan_row_stays_its_own(rng: np.random.Generator) -> None:
    for tokens in (12, 200):
        x, _, weight = operands(rng, (tokens, 256, 48), 2)
        want = np.asarray(cuda(jnp.asarray(x), weight))
        bad = x.copy()
        bad[5, 100] = np.nan
        got = np.asarray(cuda(jnp.asarray(bad), weight))
        assert np.isnan(got[5]).all()
        assert_bitwise(np.delete(got, 5, 0), np.delete(want, 5, 0))


def test_kept_full_weight_and_empty_batches(rng: np.random.Generator) -> None:
    x, w, weight = operands(rng, (6, 128, 16), 2)
    kept = split_router_weight(jnp.asarray(w), 2, keep_full=True)
    assert_bitwise(cuda(jnp.asarray(x), kept), cuda(jnp.asarray(x), weight))
    assert cuda(jnp.zeros((0, 128), jnp.bfloat16), weight).shape == (0, 16)


@pytest.mark.parametrize("tokens", [8, 256])
def test_in_a_loop_of_graphs(rng: np.random.Generator, tokens: int) -> None:
    """Six calls a step, enough for XLA to record a CUDA graph, in a loop with new inputs."""
    x, _, weight = operands(rng, (tokens, 512, 96), 2)

    def step(index: jax.Array, carry: jax.Array) -> jax.Array:
        del index
        for _ in range(6):
            logits = cuda(carry, weight)
            carry = (carry + jnp.tanh(logits[:, :1]).astype(carry.dtype)).astype(carry.dtype)
        return carry

    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 4, step, x))
    start = jnp.asarray(x)
    want = start
    for index in range(4):
        want = step(jnp.int32(index), want)
    for _ in range(3):
        assert_bitwise(looped(start), want)


def test_float32_has_no_kernel() -> None:
    weight = split_router_weight(jnp.ones((4, 16)))
    with pytest.raises(NotImplementedError, match="router_gemm: .*x must be bfloat16, got float"):
        cuda(jnp.ones((2, 16)), weight)
