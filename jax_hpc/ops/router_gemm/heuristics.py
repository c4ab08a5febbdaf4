"""Which form of router_gemm is the faster one, as measured."""

from typing import NamedTuple


class OneToken(NamedTuple):
    """Microseconds of one token's logits on an H200, two terms, cold, inside a jitted loop."""

    hidden: int
    experts: int
    kernel: float
    xla_parts: float
    xla_full: float


ONE_TOKEN = (
    OneToken(4096, 128, kernel=3.02, xla_parts=2.47, xla_full=2.66),
    OneToken(4096, 192, kernel=3.23, xla_parts=3.07, xla_full=3.17),
    OneToken(3072, 384, kernel=3.65, xla_parts=2.87, xla_full=3.44),
    OneToken(6144, 768, kernel=6.99, xla_parts=6.34, xla_full=7.05),
)
XLA_UP_TO_TOKENS = 1
"""A matrix-vector product is one fused kernel to XLA, with nothing to exchange between CTAs; for
more tokens it calls a matrix product: 7.0 us for 8 at H 4096, E 192, and the kernel takes 3.4."""
PARTS_UP_TO_TERMS = 2
"""Terms whose sum XLA forms in that fused kernel faster than it reads a float32 weight: so many
bf16 parts are no more bytes."""


def prefers_kernel(*, tokens: int) -> bool:
    """Whether "auto" takes the kernel where there is one."""
    return tokens > XLA_UP_TO_TOKENS


def prefers_parts(*, tokens: int, terms: int) -> bool:
    """Whether XLA's form sums the parts though the full weight was kept."""
    return tokens <= XLA_UP_TO_TOKENS and terms <= PARTS_UP_TO_TERMS
