"""The fp8 quantisation rule against ml_dtypes and by its stated properties."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_hpc import fp8
from tests.support.numerics import assert_bitwise


def test_saturates_and_keeps_nan() -> None:
    x = jnp.array([0.0, -0.0, 447.0, 448.0, 464.9, 465.0, 1e9, jnp.inf, -jnp.inf, jnp.nan, 1e-9])
    got = np.asarray(jax.jit(fp8.saturate_cast)(x)).astype(np.float32)
    want = np.array([0, -0.0, 448, 448, 448, 448, 448, 448, -448, np.nan, 0], np.float32)
    assert_bitwise(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got, want)


def test_rounds_to_nearest_even_like_ml_dtypes(rng: np.random.Generator) -> None:
    x = np.concatenate(
        [rng.uniform(-448, 448, 4096), rng.normal(0, 1, 4096), rng.normal(0, 2e-3, 4096)]
    ).astype(np.float32)
    assert_bitwise(jax.jit(fp8.saturate_cast)(x), x.astype(ml_dtypes.float8_e4m3fn))


def test_quantising_cannot_be_optimised_away(rng: np.random.Generator) -> None:
    """XLA may drop a conversion to fp8 and back; the values must be fp8's all the same."""
    x = np.concatenate([rng.normal(0, s, 2048) for s in (1e-3, 1e-2, 1, 300)]).astype(np.float32)
    got = jax.jit(lambda x: fp8.saturate_cast(x).astype(jnp.float32))(x)
    want = x.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert_bitwise(got, want)


def test_amax_scale_spans_the_range(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(0, 3, (5, 64)).astype(np.float32)).at[2].set(0.0)
    scale = jax.jit(lambda x: fp8.amax_scale(x, axis=1))(x)
    want = np.abs(np.asarray(x)).max(axis=1) * np.float32(1 / 448)
    want[2] = 1.0
    assert_bitwise(scale, want.astype(np.float32))
    q = jax.jit(lambda x, s: fp8.quantize(x, s[:, None]))(x, scale)
    assert np.abs(np.asarray(q[3]).astype(np.float32)).max() == 448.0
    back = np.asarray(fp8.dequantize(q, scale[:, None]))
    # Half a step of 3 mantissa bits, and half the smallest subnormal step.
    bound = np.abs(np.asarray(x)) * 2**-4 + np.asarray(scale)[:, None] * 2**-10
    assert np.all(np.abs(back - np.asarray(x)) <= bound)


def test_tiny_rows_become_zero_and_not_nan() -> None:
    """Where the scale is no normal float32, its reciprocal is infinite and 0 times it NaN."""
    amax = np.float32([1e-30, 6e-36, 5e-36, 1e-38, 1e-44])
    x = np.stack([amax, 0 * amax], axis=1)
    scale = jax.jit(lambda x: fp8.amax_scale(x, axis=1))(x)
    np.testing.assert_allclose(scale[:2], amax[:2] / 448, rtol=1e-6)
    np.testing.assert_array_equal(scale[2:], 1.0)
    for quantize in (fp8.quantize, jax.jit(fp8.quantize)):
        q = np.asarray(quantize(x, scale[:, None])).astype(np.float32)
        np.testing.assert_array_equal(q, [[448, 0], [448, 0], [0, 0], [0, 0], [0, 0]])


def test_reciprocal_is_rounded_before_the_product(rng: np.random.Generator) -> None:
    x, scale = rng.normal(0, 1, 999).astype(np.float32), np.float32(0.0137)
    want = (x * (np.float32(1) / scale)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert_bitwise(jax.jit(fp8.quantize)(x, scale), want)


def test_a_bad_row_stays_its_own(rng: np.random.Generator) -> None:
    x = rng.normal(0, 1, (4, 32)).astype(np.float32)
    bad = x.copy()
    bad[1, 3], bad[2, 5] = np.nan, np.inf

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        return fp8.quantize(x, fp8.amax_scale(x, axis=1)[:, None])

    good_rows = np.array([0, 3])
    assert_bitwise(np.asarray(run(bad))[good_rows], np.asarray(run(x))[good_rows])
