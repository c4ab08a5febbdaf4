"""Router shapes of real models, shared by tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """One router: hidden size and experts (zero experts included)."""

    name: str
    hidden: int
    experts: int


CASES = (
    Case("hy3", hidden=4096, experts=192),
    Case("qwen3", hidden=4096, experts=128),
    Case("longcat", hidden=6144, experts=768),
    Case("longcat-lite", hidden=3072, experts=384),
)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Row counts of the recorded baselines."""
