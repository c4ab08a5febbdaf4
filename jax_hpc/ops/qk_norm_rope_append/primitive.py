"""qk_norm_rope_append as a JAX primitive."""

from jax_hpc._primitive import Fold, Operator
from jax_hpc.ops.qk_norm_rope_append import reference
from jax_hpc.ops.qk_norm_rope_append.signature import shape_rule

OPERATOR = Operator(
    "qk_norm_rope_append",
    shape_rule=shape_rule,
    reference=reference.qk_norm_rope_append,
    fold=Fold(frozenset({"qkv", "positions", "slots"}), frozenset({"q", "q_scale"})),
    gradient="it writes a cache in place and serves inference; train with plain attention",
)
