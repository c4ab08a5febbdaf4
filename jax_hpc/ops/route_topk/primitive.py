"""route_topk as a JAX primitive."""

from jax_hpc._primitive import Fold, Operator
from jax_hpc.ops.route_topk import reference
from jax_hpc.ops.route_topk.signature import shape_rule

OPERATOR = Operator(
    "route_topk",
    shape_rule=shape_rule,
    reference=reference.route_topk,
    fold=Fold(frozenset({"logits"}), frozenset({"ids", "weights", "identity_weight"})),
    gradient="it serves inference; differentiate the softmax or sigmoid of the logits and "
    "jax.lax.top_k instead",
)
