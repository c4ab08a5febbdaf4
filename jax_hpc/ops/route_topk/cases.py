"""Routers of real models, shared by tests and benchmarks."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One router: scored experts (zero experts included), experts per token, and the options."""

    name: str
    experts: int
    k: int
    options: dict[str, Any]
    has_bias: bool


CASES = (
    Case("qwen3", 128, 8, {"renormalize": True}, has_bias=False),
    Case(
        "hy3",
        192,
        8,
        {"scoring": "sigmoid", "renormalize": True, "scale": 2.826},
        has_bias=True,
    ),
    Case("longcat", 768, 12, {"scale": 6.0, "num_zero_experts": 256}, has_bias=True),
    Case("longcat-lite", 384, 12, {"scale": 6.0, "num_zero_experts": 128}, has_bias=True),
    Case(
        "deepseek-v3",
        256,
        8,
        {
            "scoring": "sigmoid",
            "renormalize": True,
            "scale": 2.5,
            "num_groups": 8,
            "topk_groups": 4,
        },
        has_bias=True,
    ),
)
