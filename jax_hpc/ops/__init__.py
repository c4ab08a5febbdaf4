"""The operators. Each folder is one operator: api, signature, reference, primitive, cases."""

from jax_hpc.ops.router_gemm import SplitWeight, router_gemm, split_router_weight

__all__ = [
    "SplitWeight",
    "router_gemm",
    "split_router_weight",
]
