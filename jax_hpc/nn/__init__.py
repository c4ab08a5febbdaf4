"""Flax nnx modules on the operators: layers of one's own, or the parts of a whole model."""

from jax_hpc.nn.attention import PagedAttention
from jax_hpc.nn.linear import Embedding, GatedMLP, Linear, project
from jax_hpc.nn.moe import FusedMoE
from jax_hpc.nn.norm import RMSNorm
from jax_hpc.nn.router import SplitRouter

__all__ = [
    "Embedding",
    "FusedMoE",
    "GatedMLP",
    "Linear",
    "PagedAttention",
    "RMSNorm",
    "SplitRouter",
    "project",
]
