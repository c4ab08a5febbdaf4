"""decode_attention as a JAX primitive."""

from jax_hpc._primitive import Fold, Operator
from jax_hpc.ops.decode_attention import reference, xla
from jax_hpc.ops.decode_attention.signature import shape_rule

OPERATOR = Operator(
    "decode_attention",
    shape_rule=shape_rule,
    reference=reference.decode_attention,
    xla=xla.decode_attention,
    fold=Fold(frozenset({"q", "page_table", "kv_lens", "q_scale"}), frozenset({"out", "lse"})),
    gradient="it serves decoding; train with an attention over the unpaged sequence, such as "
    "jax.nn.dot_product_attention",
)
