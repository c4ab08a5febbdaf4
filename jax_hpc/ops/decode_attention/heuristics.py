"""How much of the cache XLA's form gathers at a time, and how a kernel's launch cuts it."""

from typing import NamedTuple

from jax_hpc.ops.decode_attention.schedule.heuristics import TILE_TOKENS, num_sms

_BLOCK_BYTES = 64 * 2**20
_BLOCK_TOKENS = 512

_FEW_SEQUENCES = 32
_STATIC_SPLITS = {True: (16, 512), False: (4, 4096)}
"""Of few sequences and of more: splits, and the fewest tokens of one."""


class Cut(NamedTuple):
    """How a kernel cuts the keys: struct Cut of cuda/decode_attention/config.h."""

    num_ctas: int
    splits: int
    min_split_tiles: int


def block_pages(*, batch: int, num_kv_heads: int, page_size: int, head_dim: int) -> int:
    """Pages per sequence and block: 512 tokens, less where K of a block passes 64 MiB.

    Products over fewer tokens than that run below the memory's speed; more would be wasted on
    short sequences, since a block is the least that is read.
    """
    bytes_per_token = 4 * max(batch, 1) * num_kv_heads * max(head_dim, 1)
    tokens = min(_BLOCK_TOKENS, _BLOCK_BYTES // bytes_per_token)
    return max(1, tokens // page_size)


def choose_cut(
    *,
    batch: int,
    num_splits: int | str | None,
    scheduled_ctas: int | None,
) -> Cut:
    """The cut of a call: by its schedule, by one that its launch makes, or by ``num_splits``."""
    if num_splits == "static":
        splits, tokens = _STATIC_SPLITS[batch <= _FEW_SEQUENCES]
        return Cut(0, splits, tokens // TILE_TOKENS)
    if num_splits is not None:
        return Cut(0, int(num_splits), 1)
    if scheduled_ctas is not None:
        return Cut(scheduled_ctas, 0, 0)
    return Cut(num_sms(), 0, 0)


def workspace_slots(cut: Cut, *, batch: int, num_kv_heads: int) -> int:
    """Partial results that may arise, as workspace_slots of cuda/decode_attention/config.h."""
    return batch * num_kv_heads * cut.splits if cut.splits > 0 else 2 * cut.num_ctas
