"""Fused Mixture-of-Experts layer: bf16, per-tensor fp8 and block fp8 experts."""

from jax_hpc.ops.fused_moe.api import fused_moe
from jax_hpc.ops.fused_moe.weights import (
    DenseExperts,
    Experts,
    Fp8BlockExperts,
    Fp8TensorExperts,
    quantize_experts_blockwise,
    quantize_experts_per_tensor,
)

__all__ = [
    "DenseExperts",
    "Experts",
    "Fp8BlockExperts",
    "Fp8TensorExperts",
    "fused_moe",
    "quantize_experts_blockwise",
    "quantize_experts_per_tensor",
]
