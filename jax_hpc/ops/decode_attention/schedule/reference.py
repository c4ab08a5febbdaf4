"""Truth of decode_schedule: one scan over the sequences and one search per CTA.

The tiles of all pairs lie end to end on a cost axis. The axis can be longer than int32 counts
(65,536 sequences of 2^31 tokens), so costs are divided by a power of two where they must be;
boundaries are still exact tiles, only their balance is as coarse as the division.
"""

import jax
import jax.numpy as jnp

from jax_hpc.ops.decode_attention.schedule.heuristics import (
    EMPTY_COST,
    TILE_COST,
    TILE_TOKENS,
    min_cta_cost,
    task_cost,
)
from jax_hpc.ops.decode_attention.schedule.signature import Operands, Params, Results

_AXIS_BITS = 30  # plus at most one unit of rounding per pair: below 2^31
_INT32_MAX = 2**31 - 1


def decode_schedule(operands: Operands, params: Params) -> Results:
    if operands.kv_lens.shape[0] == 0:
        bounds = jnp.zeros((params.num_ctas + 1,), jnp.int32)
        return Results(bounds, bounds, jnp.full((params.num_ctas,), -1, jnp.int32))
    heads = params.num_kv_heads
    tiles = count_tiles(operands.kv_lens, params.q_len, params.window)
    task = task_cost(fp8_cache=params.fp8_cache)
    cost, shift = _axis_costs(tiles, heads, task)
    ends = jnp.cumsum(cost * heads)
    cuts = _cuts(ends[-1], params.num_ctas, min_cta_cost(fp8_cache=params.fp8_cache))
    sequence = _search(ends, cuts)
    # A cut at the very end falls into no sequence; it is put right below.
    beyond = sequence == tiles.shape[0]
    sequence = jnp.minimum(sequence, tiles.shape[0] - 1)
    offset = cuts - (ends[sequence] - cost[sequence] * heads)
    head, within = jnp.divmod(offset, cost[sequence])
    tile = ((within << shift) - task + TILE_COST // 2) // TILE_COST
    tile = jnp.clip(tile, 0, tiles[sequence])
    pair = sequence * heads + head
    # A cut behind a pair's last tile is a cut before the next pair.
    whole = (tile == tiles[sequence]) & (tile > 0)
    pair = jnp.where(beyond, tiles.shape[0] * heads, jnp.where(whole, pair + 1, pair))
    tile = jnp.where(beyond | whole, 0, tile)
    return Results(pair, tile, _merges(pair, tile))


def first_tile(kv_lens: jax.Array, q_len: int, window: int | None) -> jax.Array:
    """Tile of the first key that any query of a sequence sees."""
    if window is None:
        return jnp.zeros_like(kv_lens)
    reach = min(q_len + window - 1, _INT32_MAX)
    return jnp.maximum(jnp.maximum(kv_lens, 0) - reach, 0) // TILE_TOKENS


def count_tiles(kv_lens: jax.Array, q_len: int, window: int | None) -> jax.Array:
    """Tiles of each of a sequence's pairs."""
    lens = jnp.maximum(kv_lens, 0)
    # Not (lens + 63) // 64, which overflows near 2^31.
    last = lens // TILE_TOKENS + jnp.minimum(lens % TILE_TOKENS, 1)
    return last - first_tile(lens, q_len, window)


def _axis_costs(tiles: jax.Array, heads: int, task: int) -> tuple[jax.Array, jax.Array]:
    """Cost of one pair of each sequence in units of 2^shift, with a sum below 2^31."""
    cost = jnp.where(tiles > 0, tiles * TILE_COST + task, EMPTY_COST)
    # The exact total in two words: at most 65,536 low halves fit uint32.
    low = jnp.sum((cost & 0xFFFF).astype(jnp.uint32), dtype=jnp.uint32)
    high = jnp.sum(cost >> 16, dtype=jnp.int32) + (low >> 16).astype(jnp.int32)
    bits = _bit_length(high) + 16 + heads.bit_length()  # total * heads < 2^bits
    shift = jnp.maximum(bits - _AXIS_BITS, 0)
    return (cost + (1 << shift) - 1) >> shift, shift


def _bit_length(x: jax.Array) -> jax.Array:
    return 32 - jax.lax.clz(x)


def _cuts(total: jax.Array, num_ctas: int, floor: int) -> jax.Array:
    """Boundaries of near-equal spans of the axis: [num_ctas + 1], the last ones empty if idle."""
    working = jnp.clip(total // floor, 1, num_ctas)
    share, rest = jnp.divmod(total, working)
    index = jnp.minimum(jnp.arange(num_ctas + 1, dtype=jnp.int32), working)
    return index * share + jnp.minimum(index, rest)


def _merges(pair: jax.Array, tile: jax.Array) -> jax.Array:
    """For each CTA that starts a cut pair, the last CTA with a piece of it, else -1."""
    cut_pair = pair[1:]
    starts_here = (pair[:-1] < cut_pair) | (tile[:-1] == 0)
    last = _search(pair, cut_pair) - 1
    return jnp.where((tile[1:] > 0) & starts_here, last, -1)


def _search(ends: jax.Array, values: jax.Array) -> jax.Array:
    """Number of ``ends`` at or below each value; unrolled, so that it is one fused kernel."""
    found = jnp.searchsorted(ends, values, side="right", method="scan_unrolled")
    return found.astype(jnp.int32)
