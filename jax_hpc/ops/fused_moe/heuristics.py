"""How XLA's form of fused_moe cuts its work, and what the kernels' launch needs."""

MAX_TILE_ROWS = 128
_FEWEST_TILE_ROWS = 8
_SEGMENTS = 128
_PAIRS_OF_SEGMENT = 4096


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of one tile, for ``pairs = T * K`` (token, expert) pairs over E experts.

    Twice the average an expert gets, as a power of two: a larger tile pads more, a smaller one
    reads an expert's weights more than once. One row while experts seldom get a second one.
    Measured: E, K, H, I = 16, 4, 128, 64 and 64, 8, 512, 256 on a CPU, 192, 8, 4096, 192 on a
    GPU, T = 1 to 512; within 20 % of the best power of two in each.
    """
    if pairs <= experts:
        return 1
    wanted = -(-2 * pairs // experts)
    return min(MAX_TILE_ROWS, 1 << (wanted - 1).bit_length())


def max_tiles(pairs: int, experts: int, rows: int) -> int:
    """Most tiles that any routing can need: each expert may leave one tile part full."""
    return min(pairs, pairs // rows + min(experts, pairs))


def prefers_ragged_dot(pairs: int, experts: int) -> bool:
    """Whether ``lax.ragged_dot`` beats the tile loop for bf16 experts on a GPU.

    It costs as much for few pairs as for many, the loop about 15 us a tile. Measured on one
    H200 with E, K, H, I = 192, 8, 4096, 192: T = 1: 0.71 ms against 0.25, T = 8: 0.80 against
    0.60, T = 64: 1.5 against 3.4, T = 512: 8.5 against 5.0. On a CPU it loses everywhere (3 to
    100 times), since it multiplies every row with every expert there.
    """
    rows = tile_rows(pairs, experts)
    return pairs > experts // 3 and rows < MAX_TILE_ROWS


def tile_capacity(pairs: int, experts: int) -> int:
    """Tiles that the kernels may make of any routing: tile_capacity of cuda/fused_moe/launch.h."""
    return max_tiles(pairs, experts, _FEWEST_TILE_ROWS)


def num_counts(tokens: int, top_k: int, experts: int) -> int:
    """Counts that CTAs of the index leave for each other, as num_counts of the same file.

    Of each segment of the tokens two experts' in a word, whether or not a call has segments: that
    depends on the device.
    """
    segment = min(-(-tokens // _SEGMENTS), _PAIRS_OF_SEGMENT // top_k)
    return -(-tokens // segment) * -(-experts // 2)


def outputs_width(hidden: int, inter: int, *, is_block: bool, is_bf16: bool) -> int:
    """Values of bf16 that a row has where experts' outputs lie, as num_outputs of the same file.

    Outputs are bf16, or float32 of bf16 experts. Before them the place holds, of block experts,
    the intermediate in float32, or for the wide products x, in e4m3 with its scales or in bf16,
    which is less.
    """
    if is_bf16:
        return 2 * hidden
    return max(hidden, 2 * inter) if is_block else hidden
