"""prefill_attention as a JAX primitive."""

from jax_hpc._primitive import Operator
from jax_hpc.ops.prefill_attention import reference, xla
from jax_hpc.ops.prefill_attention.signature import shape_rule

OPERATOR = Operator(
    "prefill_attention",
    shape_rule=shape_rule,
    reference=reference.prefill_attention,
    xla=xla.prefill_attention,
    gradient="it serves inference; train with an attention over the unpaged sequence, such as "
    "jax.nn.dot_product_attention",
)
