"""The one fp8 quantisation rule of the library (e4m3, saturating, scales multiply).

Every operator, weight helper and module quantises through these functions, so that a value
quantised ahead of a call has the same bits as one quantised inside it.
"""

import jax
import jax.numpy as jnp

E4M3 = jnp.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = 128
"""Values, or rows and columns of a weight, that share a scale in the block-fp8 formats."""

_SMALLEST_NORMAL = 2.0**-6
_SMALLEST_SCALE = 2.0**-126
_SUBNORMAL_STEP = 2.0**-9
_MANTISSA_BITS = 3


def saturate_cast(x: jax.Array) -> jax.Array:
    """Round to float8_e4m3fn (nearest, ties to even), clamping to +-448; NaN stays NaN.

    A plain conversion turns values from 465 on into NaN, since e4m3fn has no infinity. The
    value is rounded to e4m3's grid before it is converted: XLA may drop a conversion to fp8 and
    back (``xla_allow_excess_precision``), which would then undo the quantisation.
    """
    x = jnp.clip(x.astype(jnp.float32), -E4M3_MAX, E4M3_MAX)
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=_MANTISSA_BITS)
    subnormal = jnp.round(x * (1 / _SUBNORMAL_STEP)) * _SUBNORMAL_STEP
    return jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, subnormal, normal).astype(E4M3)


def amax_scale(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """Dynamic scale over ``axis``: float32 ``amax(|x|) * (1 / 448)``, and 1.0 where amax is 0.

    The reduced axes are dropped. A product with the rounded reciprocal, since XLA turns a
    division by a constant into one anyway: so every compiler gives the same bits.

    Also 1.0 where the product is below float32's normal numbers (amax under 5.3e-36, which then
    quantises to 0): such a scale has an infinite reciprocal, or is flushed to 0 and has one, and
    that would make NaN of a zero beside it.
    """
    amax = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axis, initial=0.0)
    scale = amax * jnp.float32(1.0 / E4M3_MAX)
    return jnp.where(scale < _SMALLEST_SCALE, jnp.float32(1.0), scale)


def quantize(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``saturate_cast(float32(x) * (1 / scale))``; ``scale`` must broadcast against ``x``.

    The reciprocal is rounded to float32 first: one division per scale instead of one per
    element, and a rule that a kernel can repeat bit for bit.
    """
    reciprocal = jnp.float32(1.0) / scale.astype(jnp.float32)
    return saturate_cast(x.astype(jnp.float32) * reciprocal)


def dequantize(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``float32(x) * scale``; ``scale`` must broadcast against ``x``."""
    return x.astype(jnp.float32) * scale.astype(jnp.float32)
