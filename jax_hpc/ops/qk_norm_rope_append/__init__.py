"""The attention prologue: QK-norm, rotary embedding and the write into the paged cache."""

from jax_hpc.ops.qk_norm_rope_append.api import qk_norm_rope_append
from jax_hpc.ops.qk_norm_rope_append.signature import PrologueOut

__all__ = ["PrologueOut", "qk_norm_rope_append"]
