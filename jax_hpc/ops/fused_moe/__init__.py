"""Fused Mixture-of-Experts layer: bf16, per-tensor fp8 and block fp8 experts."""

from jax_hpc.ops.fused_moe.api import fused_moe
from jax_hpc.ops.fused_moe.checkpoint import (
    ExpertTensors,
    check_scales,
    load_dense_experts,
    load_fp8_block_experts,
    load_fp8_tensor_experts,
)
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
    "ExpertTensors",
    "Experts",
    "Fp8BlockExperts",
    "Fp8TensorExperts",
    "check_scales",
    "fused_moe",
    "load_dense_experts",
    "load_fp8_block_experts",
    "load_fp8_tensor_experts",
    "quantize_experts_blockwise",
    "quantize_experts_per_tensor",
]
