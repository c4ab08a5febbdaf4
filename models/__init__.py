"""Whole models: one file each, and the registry that maps a checkpoint's architecture to one."""

from jax_hpc.models.hy3 import Hy3, Hy3Config
from jax_hpc.models.qwen3 import Qwen3, Qwen3Config
from jax_hpc.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig
from jax_hpc.models.registry import MODELS

__all__ = [
    "MODELS",
    "Hy3",
    "Hy3Config",
    "Qwen3",
    "Qwen3Config",
    "Qwen3MoE",
    "Qwen3MoEConfig",
]
