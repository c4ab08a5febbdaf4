"""What fused_moe takes and gives: operands, static parameters, results and their shapes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_hpc.fp8 import E4M3
from jax_hpc.ops.fused_moe.weights import Experts


class Operands(NamedTuple):
    """Arrays of one call, normalised by api.py.

    Per-tensor experts have the scale of an x that is fp8 already in ``input_scale``; ``x_scale``
    is that of block experts only.
    """

    x: jax.Array
    topk_ids: jax.Array
    topk_weights: jax.Array
    experts: Experts
    x_scale: jax.Array | None
    expert_offset: jax.Array
    shared_output: jax.Array | None
    identity_weight: jax.Array | None


class Results(NamedTuple):
    out: Any


@dataclasses.dataclass(frozen=True)
class Params:
    """Static parameters, beside what the experts' type, shapes and block_rows say.

    chosen_among: experts of all ranks, or None for those of the call. It changes how work is
        cut, and results by roundings alone.
    """

    chosen_among: int | None = None


def output_dtype(x_dtype: Any) -> Any:
    """x's dtype; bf16 where x is fp8."""
    return jnp.bfloat16 if x_dtype == E4M3 else x_dtype


def shape_rule(operands: Operands, params: Params) -> Results:
    del params
    return Results(jax.ShapeDtypeStruct(operands.x.shape, output_dtype(operands.x.dtype)))
