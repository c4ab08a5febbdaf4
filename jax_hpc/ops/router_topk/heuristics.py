"""When the choice of experts starts before the product of the router has ended."""

from typing import NamedTuple


class Overlap(NamedTuple):
    """Microseconds of both kernels on an H200, in a CUDA graph, H 4096, two terms, K 8."""

    tokens: int
    experts: int
    overlapped: float
    one_after_the_other: float


MEASURED = (
    Overlap(1, 192, 4.79, 5.07),
    Overlap(64, 192, 5.32, 5.86),
    Overlap(1024, 192, 14.21, 13.25),
    Overlap(4096, 192, 29.27, 27.84),
    Overlap(1, 384, 5.57, 5.91),
    Overlap(64, 384, 6.65, 6.97),
    Overlap(1024, 384, 21.85, 19.66),
    Overlap(1, 768, 7.29, 7.66),
    Overlap(64, 768, 8.82, 9.04),
    Overlap(1024, 768, 28.30, 26.99),
)
MOST_OVERLAPPED_TOKENS = 128
"""With more the CTAs of the choice that wait take places of the product's own from it."""


def overlaps(tokens: int) -> bool:
    return tokens <= MOST_OVERLAPPED_TOKENS
