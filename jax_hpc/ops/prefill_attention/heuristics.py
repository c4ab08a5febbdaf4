"""Decisions of prefill_attention: the kernel's workspace, XLA's block sizes."""

_TILE_ROWS = 128
_ROW_TILE_INTS = 8

_SCORE_BYTES = 32 * 2**20
_BLOCK_TOKENS = 512
_BLOCK_ROWS = 256


def block_pages(page_size: int) -> int:
    """Pages of keys per block: 512 tokens."""
    return max(1, _BLOCK_TOKENS // page_size)


def block_rows(*, max_q_len: int, num_q_heads: int, block_tokens: int) -> int:
    """Chunk rows per block: 256, less where the block's scores pass 32 MiB."""
    fitting = _SCORE_BYTES // (4 * max(num_q_heads, 1) * block_tokens)
    return max(1, min(max_q_len, _BLOCK_ROWS, fitting))


def plan_ints(*, tokens: int, batch: int, group: int) -> int:
    """int32 of the kernel's plan, as plan_ints in cuda/prefill_attention/config.h counts them.

    A header, then an entry for every tile of 128 rows (heads of one KV head and neighbouring
    tokens of one sequence) that any lengths can give.
    """
    return (1 + tokens * group // _TILE_ROWS + batch) * _ROW_TILE_INTS
