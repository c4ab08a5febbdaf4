"""The operators. Each folder is one operator: api, signature, reference, primitive, cases."""

from jax_hpc.ops.decode_attention import DecodeSchedule, decode_attention, decode_schedule
from jax_hpc.ops.fused_moe import DenseExperts, Fp8BlockExperts, Fp8TensorExperts, fused_moe
from jax_hpc.ops.prefill_attention import prefill_attention
from jax_hpc.ops.qk_norm_rope_append import PrologueOut, qk_norm_rope_append
from jax_hpc.ops.rms_norm import NormOut, rms_norm
from jax_hpc.ops.route_topk import RouteResult, route_topk
from jax_hpc.ops.router_gemm import SplitWeight, router_gemm, split_router_weight
from jax_hpc.ops.router_topk import router_topk

__all__ = [
    "DecodeSchedule",
    "DenseExperts",
    "Fp8BlockExperts",
    "Fp8TensorExperts",
    "NormOut",
    "PrologueOut",
    "RouteResult",
    "SplitWeight",
    "decode_attention",
    "decode_schedule",
    "fused_moe",
    "prefill_attention",
    "qk_norm_rope_append",
    "rms_norm",
    "route_topk",
    "router_gemm",
    "router_topk",
    "split_router_weight",
]
