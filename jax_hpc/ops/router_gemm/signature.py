"""What router_gemm takes and gives: operands, static parameters, results and their shapes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_hpc.ops.router_gemm.weights import SplitWeight


class Operands(NamedTuple):
    x: jax.Array
    weight: SplitWeight


class Results(NamedTuple):
    logits: Any


@dataclasses.dataclass(frozen=True)
class Params:
    """router_gemm has no static parameters: its shapes say everything."""


def shape_rule(operands: Operands, params: Params) -> Results:
    del params
    tokens, experts = operands.x.shape[0], operands.weight.parts.shape[1]
    return Results(jax.ShapeDtypeStruct((tokens, experts), jnp.float32))
