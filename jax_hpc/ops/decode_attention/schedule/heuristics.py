"""Decisions of the decode schedule: tile, costs, the floor on work per CTA, how many CTAs."""

from jax_hpc import _registry

TILE_TOKENS = 64
"""KV tokens per tile: the smallest unit of work, and the M of one Hopper wgmma."""

# Costs of the cost axis, in eighths of a tile's time. Small integers: a sequence of 2^31 tokens
# must keep its cost within int32.
TILE_COST = 8
_TASK_COST = 8
_TASK_COST_FP8 = 16
EMPTY_COST = 1
"""A pair without a key still has zeros to write, and must not be free to pile up on one CTA."""

MAX_BATCH = 65536
MAX_PAIRS = 1 << 29
MAX_CTAS = 1 << 20

_DEFAULT_SMS = 132  # H100 and H200, when a program is lowered on a host without a GPU
_ROWS_OF_TWO = 64


def task_cost(*, fp8_cache: bool) -> int:
    """What a task costs beside its tiles: query load, pipeline start and drain, output.

    As long whatever the cache holds, and a tile of fp8 takes half as long.
    """
    return _TASK_COST_FP8 if fp8_cache else _TASK_COST


def min_cta_cost(*, fp8_cache: bool) -> int:
    """Floor on work per CTA: splitting finer costs more in the merge than it gains.

    Never below TILE_COST: two cuts inside one pair must fall on different tiles.
    """
    return 2 * TILE_COST + task_cost(fp8_cache=fp8_cache)


def num_sms() -> int:
    """Streaming multiprocessors of this process's first GPU, 132 where there is none."""
    devices = _registry.gpus()
    return int(devices[0].core_count) if devices else _DEFAULT_SMS


def ctas_per_sm(*, num_q_heads: int, num_kv_heads: int, q_len: int) -> int:
    """Persistent CTAs on one SM, as ``choose`` in cuda/decode_attention/config.h holds them.

    Two, so that one's tiles stream while the other ends a task; more than 64 query rows of a
    KV head take the registers of a whole SM.
    """
    return 2 if num_q_heads // num_kv_heads * q_len <= _ROWS_OF_TWO else 1
