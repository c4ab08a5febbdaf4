"""Attention shapes of real models and mixes of lengths, shared by tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Heads:
    """One layer's heads on one device."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int = 128
    window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False


@dataclasses.dataclass(frozen=True)
class Mix:
    """A decode batch: tokens in the cache of each sequence."""

    name: str
    kv_lens: tuple[int, ...]


MODELS = (
    Heads("qwen3-30b-a3b", 32, 4),
    Heads("qwen3-235b-a22b/tp4", 16, 1),
    Heads("qwen3-235b-a22b/tp8", 8, 1),
    Heads("qwen3-coder-480b/tp8", 12, 1),
    Heads("hy3", 64, 8),
    Heads("hy3/tp8", 8, 1),
    Heads("glm-4.6/tp8", 12, 1),
    Heads("gpt-oss-120b/full", 64, 8, head_dim=64, sinks=True),
    Heads("gpt-oss-120b/window", 64, 8, head_dim=64, window=128, sinks=True),
    Heads("gemma-2-9b/window", 16, 8, head_dim=256, window=4096, logit_cap=50.0),
    Heads("jax-hpc-demo", 4, 2, head_dim=64),
)

_K = 1024
BASELINE_HEADS = (Heads("tp8", 8, 1), Heads("tp1", 64, 8))
BASELINE_MIXES = (
    Mix("64x512", (512,) * 64),
    Mix("64x4K", (4 * _K,) * 64),
    Mix("32x128+32x4K", (128,) * 32 + (4 * _K,) * 32),
    Mix("1x16K+15x64", (16 * _K,) + (64,) * 15),
    Mix("1x64K+7x4K", (64 * _K,) + (4 * _K,) * 7),
    Mix("1x64K+15x4K", (64 * _K,) + (4 * _K,) * 15),
    Mix("1x64K+31x4K", (64 * _K,) + (4 * _K,) * 31),
    Mix("1x128K+31x4K", (128 * _K,) + (4 * _K,) * 31),
    Mix("2x32K+30x4K", (32 * _K,) * 2 + (4 * _K,) * 30),
)
"""The recorded baselines: each mix with both head counts, D 128, pages of 64, bf16 and fp8."""
