"""Hopper kernels for Mixture-of-Experts decoding in JAX: operators, modules, models, loops."""

from jax_hpc import _registry
from jax_hpc._registry import info
from jax_hpc._version import __version__
from jax_hpc.ops import (
    SplitWeight,
    router_gemm,
    split_router_weight,
)
from jax_hpc.types import FallbackWarning, Implementation

_registry.register_targets()

__all__ = [
    "FallbackWarning",
    "Implementation",
    "SplitWeight",
    "__version__",
    "info",
    "router_gemm",
    "split_router_weight",
]
