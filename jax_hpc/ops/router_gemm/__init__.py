"""Router GEMM: float32-class logits from bf16 activations and a split weight."""

from jax_hpc.ops.router_gemm.api import router_gemm
from jax_hpc.ops.router_gemm.weights import SplitWeight, split_router_weight

__all__ = ["SplitWeight", "router_gemm", "split_router_weight"]
