"""router_topk as a JAX primitive: both kernels behind one handler."""

from collections.abc import Mapping
from typing import Any

import jax

from jax_hpc._primitive import Fold, Kernel, Operator
from jax_hpc.ops.route_topk.primitive import options, too_many_experts
from jax_hpc.ops.router_gemm import primitive as router_gemm
from jax_hpc.ops.router_topk import heuristics, reference, xla
from jax_hpc.ops.router_topk.signature import Operands, Params, logits_shape, shape_rule


def _unsupported(operands: Operands, params: Params) -> str | None:
    del params
    experts = operands.weight.parts.shape[1]
    return router_gemm.unsupported(operands.x, operands.weight) or too_many_experts(experts)


def _attributes(operands: Operands, params: Params) -> Mapping[str, Any]:
    overlaps = params.overlap and heuristics.overlaps(operands.x.shape[0])
    return {"options": options(params.route), "pdl": overlaps}


def _inputs(operands: Operands) -> tuple[Any, ...]:
    bias = () if operands.bias is None else (operands.bias,)
    return (operands.x, operands.weight.parts, *bias)


def _workspaces(operands: Operands, params: Params) -> tuple[jax.ShapeDtypeStruct]:
    del params
    return (logits_shape(operands),)


KERNEL = Kernel(
    target="jax_hpc.router_topk.v1",
    unsupported=_unsupported,
    attributes=_attributes,
    inputs=_inputs,
    workspaces=_workspaces,
)

OPERATOR = Operator(
    "router_topk",
    shape_rule=shape_rule,
    reference=reference.router_topk,
    xla=xla.router_topk,
    kernel=KERNEL,
    fold=Fold(frozenset({"x"}), frozenset({"ids", "weights", "identity_weight"})),
    gradient="it serves inference; differentiate the softmax or sigmoid of x @ W.T in float32 "
    "and jax.lax.top_k instead",
)
