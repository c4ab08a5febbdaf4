"""router_gemm as a JAX primitive."""

import jax.numpy as jnp

from jax_hpc._primitive import Fold, Kernel, Operator
from jax_hpc.ops.router_gemm import heuristics, reference, xla
from jax_hpc.ops.router_gemm.signature import Operands, Params, shape_rule


def _unsupported(operands: Operands, params: Params) -> str | None:
    del params
    if operands.x.dtype != jnp.bfloat16:
        return f"x must be bfloat16, got {operands.x.dtype.name}"
    return None


def _preferred(operands: Operands, params: Params) -> bool:
    del params
    (tokens, hidden), experts = operands.x.shape, operands.weight.parts.shape[1]
    return heuristics.prefers_kernel(tokens=tokens, hidden=hidden, experts=experts)


KERNEL = Kernel(
    target="jax_hpc.router_gemm.v1",
    unsupported=_unsupported,
    attributes=lambda operands, params: {},
    inputs=lambda operands: (operands.x, operands.weight.parts),
    preferred=_preferred,
)

OPERATOR = Operator(
    "router_gemm",
    shape_rule=shape_rule,
    reference=reference.router_gemm,
    xla=xla.router_gemm,
    kernel=KERNEL,
    fold=Fold(frozenset({"x"}), frozenset({"logits"})),
    gradient="it serves inference; differentiate x @ W.T in float32 instead",
)
