"""router_gemm as a JAX primitive."""

from jax_hpc._primitive import Fold, Operator
from jax_hpc.ops.router_gemm import reference, xla
from jax_hpc.ops.router_gemm.signature import shape_rule

OPERATOR = Operator(
    "router_gemm",
    shape_rule=shape_rule,
    reference=reference.router_gemm,
    xla=xla.router_gemm,
    fold=Fold(frozenset({"x"}), frozenset({"logits"})),
    gradient="it serves inference; differentiate x @ W.T in float32 instead",
)
