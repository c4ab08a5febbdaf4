"""When router_gemm's kernel is faster than XLA's form."""


def prefers_kernel(*, tokens: int, hidden: int, experts: int) -> bool:
    """Whether "auto" takes the kernel.

    A single token is a matrix-vector product, for which XLA's fused form needs one small kernel
    without any exchange between CTAs: 1.9 us against the 3 of the kernel on an H200 (H 4096,
    E 192, weights cold).
    """
    del hidden, experts
    return tokens > 1
