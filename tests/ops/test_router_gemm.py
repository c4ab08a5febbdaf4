"""router_gemm against float64: the bound of each number of terms, and its checks."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_hpc import SplitWeight, router_gemm, split_router_weight
from jax_hpc.ops.router_gemm.cases import CASES
from jax_hpc.ops.router_gemm.primitive import OPERATOR
from jax_hpc.ops.router_gemm.signature import Operands, Params
from tests.support.numerics import assert_bitwise, assert_close
from tests.support.router_products import BOUNDS, MOST_HIDDEN_OF_THREE_TERMS, exact_weight


def truth(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float64 logits, and the sum of magnitudes that the bounds are relative to."""
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    return x64 @ w64.T, np.abs(x64) @ np.abs(w64).T


@pytest.mark.parametrize("implementation", ["reference", "xla", "xla-full"])
@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize("positive", [False, True])
def test_accuracy(
    rng: np.random.Generator, implementation: str, terms: int, positive: bool
) -> None:
    x = rng.normal(0, 1, (7, 520)).astype(ml_dtypes.bfloat16)
    w = rng.normal(0, 0.1, (33, 520)).astype(np.float32)
    if positive:
        x, w = np.abs(x), np.abs(w)
    w = exact_weight(w, terms)
    weight = split_router_weight(jnp.asarray(w), terms, keep_full=implementation == "xla-full")
    want, magnitude = truth(x, w)
    if implementation == "reference":
        from jax_hpc.ops.router_gemm import reference

        got = jax.jit(reference.router_gemm, static_argnums=1)(
            Operands(x, weight), Params()
        ).logits
    else:
        got = router_gemm(jnp.asarray(x), weight, implementation="xla")
    assert got.dtype == jnp.float32
    bound = BOUNDS[terms]
    if implementation != "reference" and jax.default_backend() == "gpu":
        bound = max(bound, 2.0**-19)  # cuBLAS's float32 sums of positive terms; no form of ours
    assert_close(got, want, atol=bound * magnitude)


def test_more_terms_are_more_accurate(rng: np.random.Generator) -> None:
    x = rng.normal(0, 1, (4, 256)).astype(ml_dtypes.bfloat16)
    w = rng.normal(0, 1, (16, 256)).astype(np.float32)
    want, _ = truth(x, w)
    errors = [
        np.abs(np.asarray(router_gemm(x, split_router_weight(w, terms))) - want).max()
        for terms in (1, 2, 3)
    ]
    assert errors[0] > 50 * errors[1] and errors[1] > 3 * errors[2], errors


def test_split_is_the_stated_one(rng: np.random.Generator) -> None:
    w = rng.normal(0, 1, (5, 64)).astype(np.float32)
    parts = split_router_weight(w, 3).parts
    high = w.astype(ml_dtypes.bfloat16)
    rest = (w - high.astype(np.float32)) * 256
    low = rest.astype(ml_dtypes.bfloat16)
    third = ((rest - low.astype(np.float32)) * 256).astype(ml_dtypes.bfloat16)
    assert isinstance(parts, np.ndarray)
    assert_bitwise(parts, np.stack([high, low, third]))
    assert_bitwise(split_router_weight(jnp.asarray(w), 3).parts, parts)
    exact = split_router_weight(jnp.asarray(high), 1, keep_full=True)
    assert_bitwise(exact.full, high.astype(np.float32))


def test_float32_activations(rng: np.random.Generator) -> None:
    x = rng.normal(0, 1, (3, 128)).astype(np.float32)
    w = rng.normal(0, 1, (8, 128)).astype(np.float32)
    want, magnitude = truth(x, w)
    assert_close(router_gemm(x, split_router_weight(w, 3)), want, atol=2.0**-21 * magnitude)


def test_a_nan_row_stays_its_own(rng: np.random.Generator) -> None:
    x = rng.normal(0, 1, (4, 64)).astype(ml_dtypes.bfloat16)
    weight = split_router_weight(rng.normal(0, 1, (8, 64)).astype(np.float32))
    bad = x.copy()
    bad[2, 7] = np.nan
    got, want = np.asarray(router_gemm(bad, weight)), np.asarray(router_gemm(x, weight))
    assert np.isnan(got[2]).all()
    assert_bitwise(np.delete(got, 2, 0), np.delete(want, 2, 0))


@pytest.mark.parametrize("shape", [(0, 16, 8), (1, 1, 1), (3, 2, 17)])
def test_edge_sizes(shape: tuple[int, int, int]) -> None:
    tokens, experts, hidden = shape
    x = jnp.ones((tokens, hidden), jnp.bfloat16)
    got = router_gemm(x, split_router_weight(jnp.ones((experts, hidden))))
    np.testing.assert_array_equal(got, np.full((tokens, experts), hidden, np.float32))


def test_real_shapes_trace() -> None:
    for case in CASES:
        weight = SplitWeight(jax.ShapeDtypeStruct((2, case.experts, case.hidden), jnp.bfloat16))
        x = jax.ShapeDtypeStruct((64, case.hidden), jnp.bfloat16)
        assert jax.eval_shape(router_gemm, x, weight).shape == (64, case.experts)


def _weight(shape: tuple[int, ...] = (2, 8, 64), dtype: object = jnp.bfloat16) -> SplitWeight:
    return SplitWeight(jnp.zeros(shape, dtype))


@pytest.mark.parametrize(
    ("x", "weight", "error", "words"),
    [
        (jnp.zeros((3, 63)), _weight(), ValueError, r"'weight.parts' .* H = 63 from 'x', got"),
        (jnp.zeros(63), _weight(), ValueError, r"'x' must have shape \[T, H\]"),
        (jnp.zeros((3, 64), jnp.float16), _weight(), TypeError, "'x' must be bfloat16 or float32"),
        (jnp.zeros((3, 64)), _weight((4, 8, 64)), ValueError, "1 to 3 terms, got 4"),
        (jnp.zeros((3, 64)), _weight(dtype=jnp.float32), TypeError, "'weight.parts' must be bf"),
        (jnp.zeros((3, 64)), jnp.zeros((8, 64)), TypeError, "must be a SplitWeight"),
        (
            jnp.zeros((3, 64)),
            SplitWeight(jnp.zeros((1, 8, 64), jnp.bfloat16), jnp.zeros((8, 65))),
            ValueError,
            "'weight.full'",
        ),
    ],
)
def test_checks(x: jax.Array, weight: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"router_gemm: argument .*{words}"):
        router_gemm(x, weight)  # pyright: ignore[reportArgumentType]


def test_split_checks() -> None:
    with pytest.raises(ValueError, match="split_router_weight: argument 'terms' must be one of 1"):
        split_router_weight(jnp.zeros((2, 2)), 4)
    with pytest.raises(TypeError, match="'weight' must be float32 or bfloat16, got float16"):
        split_router_weight(jnp.zeros((2, 2), jnp.float16))
    with pytest.raises(ValueError, match=r"'weight' must have shape \[E, H\], got \(2,\)"):
        split_router_weight(jnp.zeros(2))


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "terms", "words"),
    [
        (64 * 65535, 64, 8, 2, None),
        (64 * 65535 + 1, 64, 8, 2, "T must be at most 4194240 where H is a multiple of 8, got"),
        (16 * 65535, 63, 8, 2, None),
        (16 * 65535 + 1, 63, 8, 2, "T must be at most 1048560 where H is no multiple of 8, got"),
        (2**31, 8, 8, 2, "T must be at most 2147482624, got 2147483648"),
        (1, 2**31, 1, 2, "H must be at most 2147482624, got 2147483648"),
        (1, 8, 2**31, 2, "E must be at most 2147482624, got 2147483648"),
        (8, MOST_HIDDEN_OF_THREE_TERMS, 8, 3, None),
        (8, MOST_HIDDEN_OF_THREE_TERMS + 1, 8, 3, "H must be at most 49152 for three terms"),
        (8, MOST_HIDDEN_OF_THREE_TERMS + 1, 8, 2, None),
    ],
)
def test_what_no_launch_can_do_has_no_kernel(
    tokens: int, hidden: int, experts: int, terms: int, words: str | None
) -> None:
    x = jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16)
    weight = SplitWeight(jax.ShapeDtypeStruct((terms, experts, hidden), jnp.bfloat16))
    reason = OPERATOR.why_no_kernel(Operands(x, weight), Params())
    assert (reason is None) if words is None else (reason or "").startswith(words), reason
