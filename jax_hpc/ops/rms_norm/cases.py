"""Norm widths of real models, shared by tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """The hidden size of a model, and its norm's eps."""

    name: str
    hidden: int
    eps: float


CASES = (
    Case("qwen3-30b", 2048, 1e-6),
    Case("hy3", 4096, 1e-5),
    Case("longcat", 6144, 1e-5),
)
TOKENS = (1, 8, 64, 1024, 8192)
