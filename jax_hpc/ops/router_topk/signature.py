"""What router_topk takes and gives: operands, static parameters, results and their shapes."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_hpc.ops.route_topk import signature as route_topk
from jax_hpc.ops.route_topk.signature import RouteResult
from jax_hpc.ops.router_gemm import signature as router_gemm
from jax_hpc.ops.router_gemm.weights import SplitWeight


class Operands(NamedTuple):
    x: jax.Array
    weight: SplitWeight
    bias: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Params:
    """route: how experts are chosen. overlap: start the second kernel while the first one ends."""

    route: route_topk.Params
    overlap: bool = True


def product(operands: Operands) -> router_gemm.Operands:
    """The operands of the router product."""
    return router_gemm.Operands(operands.x, operands.weight)


def logits_shape(operands: Operands) -> jax.ShapeDtypeStruct:
    shape = (operands.x.shape[0], operands.weight.parts.shape[1])
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def shape_rule(operands: Operands, params: Params) -> RouteResult:
    choice = route_topk.Operands(logits_shape(operands), operands.bias)  # pyright: ignore
    return route_topk.shape_rule(choice, params.route)
