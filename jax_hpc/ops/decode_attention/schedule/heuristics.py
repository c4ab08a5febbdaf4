"""Decisions of the decode schedule: tile, costs, the floor on work per CTA, how many CTAs."""

from jax_hpc import _registry

TILE_TOKENS = 64
"""KV tokens per tile: the smallest unit of work, and the M of one Hopper wgmma."""

# Costs of the cost axis, in eighths of a tile's time. Small integers: a sequence of 2^31 tokens
# must keep its cost within int32.
TILE_COST = 8
_TASK_COST = 16
_TASK_COST_FP8 = 24
EMPTY_COST = 1
"""A pair without a key still has zeros to write, and must not be free to pile up on one CTA."""

MIN_CTA_COST = 32
"""Floor on work per CTA: splitting finer costs more in the merge than it gains.

Never below TILE_COST: two cuts inside one pair must fall on different tiles.
"""

WHOLE_TILES = 8
"""Where no pair has more tiles, none is cut: whole pairs take less than pieces and a merge."""

MAX_BATCH = 65536
MAX_PAIRS = 1 << 29
MAX_CTAS = 1 << 20

_DEFAULT_SMS = 132  # H100 and H200, when a program is lowered on a host without a GPU


def task_cost(*, fp8_cache: bool) -> int:
    """What a task costs beside its tiles: query load, pipeline start and drain, output.

    More of fp8's tiles, which take half as long.
    """
    return _TASK_COST_FP8 if fp8_cache else _TASK_COST


def num_sms() -> int:
    """Streaming multiprocessors of this process's first GPU, 132 where there is none.

    As many CTAs decode attention has: one on each, whose warps are enough for what an SM reads.
    """
    devices = _registry.gpus()
    return int(devices[0].core_count) if devices else _DEFAULT_SMS
