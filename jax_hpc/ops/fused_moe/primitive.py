"""fused_moe as a JAX primitive."""

from jax_hpc._primitive import Fold, Operator
from jax_hpc.ops.fused_moe import reference, xla
from jax_hpc.ops.fused_moe.signature import shape_rule

OPERATOR = Operator(
    "fused_moe",
    shape_rule=shape_rule,
    reference=reference.fused_moe,
    xla=xla.fused_moe,
    fold=Fold(
        frozenset(
            {"x", "topk_ids", "topk_weights", "x_scale", "shared_output", "identity_weight"}
        ),
        frozenset({"out"}),
    ),
    gradient="it serves inference; train with jax.lax.ragged_dot over sorted tokens instead",
)
