"""Decode attention over a paged KV cache, and the schedule that balances it."""

from jax_hpc.ops.decode_attention.api import decode_attention
from jax_hpc.ops.decode_attention.schedule import DecodeSchedule, decode_schedule

__all__ = ["DecodeSchedule", "decode_attention", "decode_schedule"]
