"""Where router_gemm's kernel is the faster form, as measured."""

from typing import NamedTuple


class OneToken(NamedTuple):
    """Microseconds of one token's logits on an H200, two terms, cold, inside a jitted loop."""

    hidden: int
    experts: int
    kernel: float
    xla: float


ONE_TOKEN = (
    OneToken(4096, 128, kernel=3.02, xla=2.47),
    OneToken(4096, 192, kernel=3.23, xla=3.07),
    OneToken(3072, 384, kernel=3.65, xla=2.87),
    OneToken(6144, 768, kernel=6.99, xla=6.34),
)
"""A matrix-vector product is one fused kernel to XLA, with nothing to exchange between CTAs. For
more tokens XLA calls a matrix product: 7.0 us for 8 at H 4096, E 192, and the kernel takes 3.4."""
XLA_UP_TO_TOKENS = 1 if all(case.xla < case.kernel for case in ONE_TOKEN) else 0


def prefers_kernel(*, tokens: int) -> bool:
    """Whether "auto" takes the kernel where there is one."""
    return tokens > XLA_UP_TO_TOKENS
