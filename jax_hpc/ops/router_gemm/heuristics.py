"""Where router_gemm's kernel is the faster form, as measured."""

from typing import NamedTuple


class OneToken(NamedTuple):
    """Microseconds of one token's logits on an H200, two terms, cold, inside a jitted loop."""

    hidden: int
    experts: int
    kernel: float
    xla: float


ONE_TOKEN = (
    OneToken(4096, 128, kernel=2.98, xla=2.68),
    OneToken(4096, 192, kernel=3.20, xla=2.71),
    OneToken(3072, 384, kernel=3.59, xla=2.94),
    OneToken(6144, 768, kernel=6.83, xla=6.23),
)
"""One token's sum is one fused kernel to XLA, with nothing to exchange between CTAs. For
more tokens XLA calls a matrix product: 7.0 us for 8 at H 4096, E 192, and the kernel takes 3.4."""
XLA_UP_TO_TOKENS = 1 if all(case.xla < case.kernel for case in ONE_TOKEN) else 0


def prefers_kernel(*, tokens: int) -> bool:
    """Whether "auto" takes the kernel where there is one."""
    return tokens > XLA_UP_TO_TOKENS
