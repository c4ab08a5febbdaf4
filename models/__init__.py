"""Whole models: one file each, and the registry that maps a checkpoint's architecture to one."""

from jax_hpc.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig
from jax_hpc.models.registry import MODELS

__all__ = ["MODELS", "Qwen3MoE", "Qwen3MoEConfig"]
