"""Decisions of the decode schedule: tile, costs, the floor on work per CTA, how many CTAs."""

import jax.numpy as jnp

from jax_hpc import _registry

TILE_TOKENS = 64
"""KV tokens per tile: the smallest unit of work, and the M of one Hopper wgmma."""

# Costs of the cost axis, in eighths of a tile's time. Small integers: a sequence of 2^31 tokens
# must keep its cost within int32.
TILE_COST = 8
TASK_COST = 8
"""What a task costs beside its tiles: query load, pipeline start and drain, output."""
EMPTY_COST = 1
"""A pair without a key still has zeros to write, and must not be free to pile up on one CTA."""

MIN_CTA_COST = 2 * TILE_COST + TASK_COST
"""Floor on work per CTA: splitting finer costs more in the merge than it gains.

Never below TILE_COST: two cuts inside one pair must fall on different tiles.
"""

MAX_BATCH = 65536
MAX_PAIRS = 1 << 29
MAX_CTAS = 1 << 20

_DEFAULT_SMS = 132  # H100 and H200, when a program is lowered on a host without a GPU
_SHARED_MEMORY = 227 * 1024  # bytes that the CTAs of one Hopper SM can share out
_MIN_STAGES = 3  # K and V tiles a CTA keeps in flight to hide one DRAM latency


def num_sms() -> int:
    """Streaming multiprocessors of this process's first GPU, 132 where there is none."""
    devices = _registry.gpus()
    return int(devices[0].core_count) if devices else _DEFAULT_SMS


def ctas_per_sm(
    *, num_q_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: str, q_len: int
) -> int:
    """Persistent CTAs that fit on one SM, judged by shared memory."""
    stage = 2 * TILE_TOKENS * head_dim * jnp.dtype(kv_dtype).itemsize
    rows = -(-num_q_heads // num_kv_heads * q_len // 8) * 8
    queries = rows * (head_dim * 2 + TILE_TOKENS * 2)  # queries and probabilities, bf16
    return max(1, min(4, _SHARED_MEMORY // (_MIN_STAGES * stage + queries)))
