"""How much of the cache XLA's form gathers at a time."""

_BLOCK_BYTES = 64 * 2**20
_BLOCK_TOKENS = 512


def block_pages(*, batch: int, num_kv_heads: int, page_size: int, head_dim: int) -> int:
    """Pages per sequence and block: 512 tokens, less where K of a block passes 64 MiB.

    Products over fewer tokens than that run below the memory's speed; more would be wasted on
    short sequences, since a block is the least that is read.
    """
    bytes_per_token = 4 * max(batch, 1) * num_kv_heads * max(head_dim, 1)
    tokens = min(_BLOCK_TOKENS, _BLOCK_BYTES // bytes_per_token)
    return max(1, tokens // page_size)
