"""Public function of rms_norm."""

import math

import jax
import jax.numpy as jnp

from jax_hpc._checks import Dims, check, check_dtype, check_scale, static_number
from jax_hpc.ops.rms_norm.primitive import OPERATOR
from jax_hpc.ops.rms_norm.signature import NormOut, Operands, Params
from jax_hpc.types import Implementation

_OPERATOR = "rms_norm"


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    *,
    residual: jax.Array | None = None,
    eps: float = 1e-6,
    out_scale: jax.Array | float | None = None,
    implementation: Implementation = "auto",
) -> NormOut:
    """``h / sqrt(mean(h^2) + eps) * weight`` of each row h of x, or of ``x + residual``.

    In float32. The sum is rounded to x's dtype first, as a model keeps it between its layers, and
    what is normalised is the rounded sum; y is rounded once. With an ``out_scale`` the rounded y
    is quantised to fp8, ``y / out_scale`` saturated at +-448, as one would do it afterwards.

    The sum is written in place of the residual if nothing reads that after the call.

    Args:
      x: ``[T, H]`` bf16 or float32.
      weight: ``[H]`` bf16 or float32.
      residual: ``[T, H]`` in x's dtype, added to x; or None.
      eps: of the norm.
      out_scale: float32 ``[]`` or a positive number: y in float8_e4m3fn by this scale; None for y
        in x's dtype.
      implementation: see :data:`jax_hpc.types.Implementation`.

    Returns:
      :class:`NormOut` (y ``[T, H]``, residual ``[T, H]`` or None).

    Raises:
      ValueError: shapes or values do not fit.
      TypeError: a dtype is not supported, or eps is not a Python number.
      NotImplementedError: ``implementation="cuda"`` and no kernel takes the case.

    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    dims = Dims(_OPERATOR)
    dims.match("x", x, "T H")
    check_dtype(_OPERATOR, "x", x, (jnp.bfloat16, jnp.float32))
    check(dims["H"] > 0, _OPERATOR, "x", expected="of H >= 1", got=tuple(x.shape))
    dims.match("weight", weight, "H")
    check_dtype(_OPERATOR, "weight", weight, (jnp.bfloat16, jnp.float32))
    if residual is not None:
        dims.match("residual", residual, "T H")
        check_dtype(_OPERATOR, "residual", residual, (x.dtype,))
    scale = out_scale
    if isinstance(scale, int | float):
        check_scale(_OPERATOR, "out_scale", scale)
        scale = jnp.float32(scale)
    if scale is not None:
        dims.match("out_scale", scale, "")
        check_dtype(_OPERATOR, "out_scale", scale, (jnp.float32,))
    eps = static_number(_OPERATOR, "eps", eps)
    check(math.isfinite(eps) and eps >= 0, _OPERATOR, "eps", expected="finite and >= 0", got=eps)
    operands = Operands(x, weight, residual, scale)
    return OPERATOR(operands, Params(eps), implementation=implementation)
