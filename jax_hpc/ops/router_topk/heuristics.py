"""When router_topk's kernels are faster than XLA's form."""

XLA_UP_TO_TOKENS: tuple[tuple[int, int, int], ...] = ()
"""(hidden, experts, tokens): "auto" takes XLA's form of a router of at least that hidden size and
at least that many experts up to so many tokens. Empty: XLA's form has not been measured yet."""


def prefers_kernel(*, tokens: int, hidden: int, experts: int) -> bool:
    """Whether "auto" takes the kernels."""
    return not any(
        hidden >= least_hidden and experts >= least_experts and tokens <= most_tokens
        for least_hidden, least_experts, most_tokens in XLA_UP_TO_TOKENS
    )
