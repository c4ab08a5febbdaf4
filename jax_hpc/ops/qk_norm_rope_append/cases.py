"""Prologue shapes of real models, shared by tests and benchmarks."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """Heads of one tensor-parallel rank, head dimension and the model's options."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    options: dict[str, Any]


_QWEN3 = {"norm": "before", "rope_style": "half", "eps": 1e-6}
_HY3 = {"norm": "before", "rope_style": "half", "eps": 1e-5}
CASES = (
    Case("qwen3-30b-tp1", 32, 4, 128, _QWEN3),
    Case("qwen3-235b-tp8", 8, 1, 128, _QWEN3),
    Case("qwen3-480b-tp8", 12, 1, 128, _QWEN3),
    Case("hy3-tp1", 64, 8, 128, _HY3),
    Case("hy3-tp8", 8, 1, 128, _HY3),
)
BASELINE_HEADS = {"tp8": "hy3-tp8", "tp1": "hy3-tp1"}
"""Names of the recorded baselines' head counts, and whose they are."""
TOKENS = (1, 64, 1024, 8192)
"""Row counts of the recorded baselines."""
