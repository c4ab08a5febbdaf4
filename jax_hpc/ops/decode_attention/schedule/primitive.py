"""decode_schedule as a JAX primitive."""

from jax_hpc._primitive import Operator
from jax_hpc.ops.decode_attention.schedule import reference
from jax_hpc.ops.decode_attention.schedule.signature import shape_rule

OPERATOR = Operator(
    "decode_schedule",
    shape_rule=shape_rule,
    reference=reference.decode_schedule,
    gradient="it maps integer lengths to an integer plan",
)
