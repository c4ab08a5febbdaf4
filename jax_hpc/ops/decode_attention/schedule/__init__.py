"""decode_schedule: how decode_attention's work is cut over persistent CTAs, on the device."""

from jax_hpc.ops.decode_attention.schedule.api import decode_schedule
from jax_hpc.ops.decode_attention.schedule.signature import DecodeSchedule

__all__ = ["DecodeSchedule", "decode_schedule"]
