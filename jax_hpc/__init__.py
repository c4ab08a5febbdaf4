"""Hopper kernels for Mixture-of-Experts decoding in JAX: operators, modules, models, loops."""

from jax_hpc import _registry
from jax_hpc._registry import info
from jax_hpc._version import __version__
from jax_hpc.cache import PagedKVCache
from jax_hpc.ops import (
    DecodeSchedule,
    DenseExperts,
    Fp8BlockExperts,
    Fp8TensorExperts,
    NormOut,
    PrologueOut,
    RouteResult,
    SplitWeight,
    decode_attention,
    decode_schedule,
    fused_moe,
    prefill_attention,
    qk_norm_rope_append,
    rms_norm,
    route_topk,
    router_gemm,
    router_topk,
    split_router_weight,
)
from jax_hpc.rope import rope_table
from jax_hpc.types import FallbackWarning, Implementation, Implementations

_registry.register_targets()

__all__ = [
    "DecodeSchedule",
    "DenseExperts",
    "FallbackWarning",
    "Fp8BlockExperts",
    "Fp8TensorExperts",
    "Implementation",
    "Implementations",
    "NormOut",
    "PagedKVCache",
    "PrologueOut",
    "RouteResult",
    "SplitWeight",
    "__version__",
    "decode_attention",
    "decode_schedule",
    "fused_moe",
    "info",
    "prefill_attention",
    "qk_norm_rope_append",
    "rms_norm",
    "rope_table",
    "route_topk",
    "router_gemm",
    "router_topk",
    "split_router_weight",
]
