"""Prefill attention: ragged chunks of several sequences over the paged KV cache."""

from jax_hpc.ops.prefill_attention.api import prefill_attention

__all__ = ["prefill_attention"]
