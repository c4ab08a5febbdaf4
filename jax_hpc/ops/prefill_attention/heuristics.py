"""Block sizes of XLA's form."""

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
