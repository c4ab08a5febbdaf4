"""What rms_norm takes and gives: operands, static parameters, results, shapes."""

import dataclasses
from typing import Any, NamedTuple

import jax

from jax_hpc.fp8 import E4M3


class Operands(NamedTuple):
    x: jax.Array
    weight: jax.Array
    residual: jax.Array | None
    out_scale: jax.Array | None


class NormOut(NamedTuple):
    """Rows, normalised, and what was normalised.

    y: ``[T, H]`` in x's dtype, or float8_e4m3fn where an out_scale was given.
    residual: ``[T, H]`` in x's dtype: ``x + residual``, for the next layer to add to; None where
      no residual was given.
    """

    y: Any
    residual: Any


@dataclasses.dataclass(frozen=True)
class Params:
    eps: float


def shape_rule(operands: Operands, params: Params) -> NormOut:
    del params
    x = operands.x
    return NormOut(
        y=jax.ShapeDtypeStruct(x.shape, x.dtype if operands.out_scale is None else E4M3),
        residual=None if operands.residual is None else jax.ShapeDtypeStruct(x.shape, x.dtype),
    )
