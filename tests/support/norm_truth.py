"""The root-mean-square norm in float64, and how far a result may be from it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hpc import fp8
from jax_hpc.ops.rms_norm import NormOut
from tests.support.numerics import assert_bitwise, assert_close


def operands(
    rng: np.random.Generator, tokens: int, hidden: int, dtype: Any, weight_dtype: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, weight and residual; the first rows are large, tiny and zero."""

    def normal(*sizes: int) -> np.ndarray:
        return rng.normal(0, 1, sizes).astype(np.float32)

    scale = np.ones((tokens, 1), np.float32)
    scale[:3, 0] = (300.0, 1e-4, 0.0)[: min(tokens, 3)] if tokens > 3 else 1.0
    x, residual = normal(tokens, hidden) * scale, normal(tokens, hidden) * scale
    weight = jnp.asarray(1 + 0.3 * normal(hidden)).astype(weight_dtype or dtype)
    return jnp.asarray(x).astype(dtype), weight, jnp.asarray(residual).astype(dtype)


def assert_normalised(
    got: NormOut, x: Any, weight: Any, residual: Any, *, eps: float, out_scale: float | None = None
) -> None:
    """One rounding from float64, of the sum as x's dtype holds it; in fp8 one more."""
    if residual is None:
        assert got.residual is None
        h = x
    else:
        # A sum of two is exact in float64, or too close to a middle to matter: round it once.
        h = (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(x.dtype)
        assert_bitwise(got.residual, h)
    rows, w = (np.asarray(a).astype(np.float64) for a in (h, weight))
    want = rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + eps) * w
    rounding = 2.0**-8 + 2.0**-19 if x.dtype == jnp.bfloat16 else 1e-6
    if out_scale is None:
        assert_close(got.y, want, rtol=rounding, atol=1e-38)
        return
    assert got.y.dtype == fp8.E4M3
    want = np.clip(want / out_scale, -448, 448)
    step = np.maximum(np.abs(want) * 2.0**-4, 2.0**-10)
    assert_close(got.y, want, atol=step + 1.01 * rounding * np.abs(want))
