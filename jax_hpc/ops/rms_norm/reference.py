"""Truth of rms_norm: float32, each result rounded once to x's dtype, and fp8 after that."""

import jax
import jax.numpy as jnp

from jax_hpc import fp8
from jax_hpc.ops.rms_norm.signature import NormOut, Operands, Params


def rms_norm(operands: Operands, params: Params) -> NormOut:
    x, weight, residual, out_scale = operands
    wide = x.astype(jnp.float32)
    if residual is not None:
        wide = _rounded(wide + residual.astype(jnp.float32), x.dtype)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    y = wide * jax.lax.rsqrt(mean_square + jnp.float32(params.eps)) * weight.astype(jnp.float32)
    return NormOut(
        y=y.astype(x.dtype)
        if out_scale is None
        else fp8.quantize(_rounded(y, x.dtype), out_scale),
        residual=None if residual is None else wide.astype(x.dtype),
    )


def _rounded(wide: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 with the values of a dtype: XLA may drop a conversion to bf16 and back."""
    if dtype == jnp.float32:
        return wide
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(wide, exponent_bits=info.nexp, mantissa_bits=info.nmant)
