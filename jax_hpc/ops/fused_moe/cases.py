"""MoE layers of real models as one rank sees them, shared by tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """Experts on the rank, experts per token, hidden and intermediate size."""

    name: str
    experts: int
    k: int
    hidden: int
    inter: int


CASES = (
    Case("hy3-tp8", experts=192, k=8, hidden=4096, inter=192),
    Case("hy3-ep8", experts=24, k=8, hidden=4096, inter=1536),
    Case("qwen3-tp8", experts=128, k=8, hidden=4096, inter=192),
    Case("qwen3-ep8", experts=16, k=8, hidden=4096, inter=1536),
    Case("qwen3-30b-tp1", experts=128, k=8, hidden=2048, inter=768),
    Case("deepseek-v3-ep32", experts=8, k=8, hidden=7168, inter=2048),
    Case("longcat-ep8", experts=64, k=12, hidden=6144, inter=2048),
    Case("longcat-lite-tp8", experts=256, k=12, hidden=3072, inter=128),
)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Batches of the recorded baselines."""
LARGE_TOKENS = (2048, 4096, 8192, 16384)
"""Of prefill: for ``LARGE_CASES``."""
LARGE_CASES = ("hy3-tp8", "hy3-ep8")


def tokens_of(name: str) -> tuple[int, ...]:
    """Batches that the layer of this name is measured with."""
    return TOKENS + (LARGE_TOKENS if name in LARGE_CASES else ())
