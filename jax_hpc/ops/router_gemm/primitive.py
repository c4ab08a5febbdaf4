"""router_gemm as a JAX primitive."""

import jax
import jax.numpy as jnp

from jax_hpc._primitive import Fold, Kernel, Operator
from jax_hpc.ops.router_gemm import heuristics, reference, xla
from jax_hpc.ops.router_gemm.signature import shape_rule
from jax_hpc.ops.router_gemm.weights import SplitWeight

_LARGEST_EXTENT = 2**31 - 2**10
"""The kernel counts in 32-bit integers and rounds up to whole tiles."""
_MOST_TOKEN_TILES = 2**16 - 1
"""Tiles of tokens lie along the second axis of a launch's grid, which CUDA limits."""
_LONGEST_EXACT = 49152
"""Hidden values up to which the sums of three terms keep their bound, in a cluster of 8 CTAs."""


def unsupported(x: jax.Array, weight: SplitWeight) -> str | None:
    """Why the kernel cannot take these operands; None when it can."""
    if x.dtype != jnp.bfloat16:
        return f"x must be bfloat16, got {x.dtype.name}"
    (tokens, hidden), experts = x.shape, weight.parts.shape[1]
    for name, extent in (("T", tokens), ("H", hidden), ("E", experts)):
        if extent > _LARGEST_EXTENT:
            return f"{name} must be at most {_LARGEST_EXTENT}, got {extent}"
    if weight.terms == 3 and hidden > _LONGEST_EXACT:
        return f"H must be at most {_LONGEST_EXACT} for three terms, got {hidden}"
    # The smallest tiles of many tokens that cuda/router_gemm/heuristics.h chooses.
    tile = 64 if hidden % 8 == 0 else 16
    if tokens > tile * _MOST_TOKEN_TILES:
        return (
            f"T must be at most {tile * _MOST_TOKEN_TILES} where H is "
            f"{'a multiple' if tile == 64 else 'no multiple'} of 8, got {tokens}"
        )
    return None


KERNEL = Kernel(
    target="jax_hpc.router_gemm.v1",
    unsupported=lambda operands, params: unsupported(operands.x, operands.weight),
    attributes=lambda operands, params: {},
    inputs=lambda operands: (operands.x, operands.weight.parts),
    preferred=lambda operands, params: heuristics.prefers_kernel(tokens=operands.x.shape[0]),
)

OPERATOR = Operator(
    "router_gemm",
    shape_rule=shape_rule,
    reference=reference.router_gemm,
    xla=xla.router_gemm,
    kernel=KERNEL,
    fold=Fold(frozenset({"x"}), frozenset({"logits"})),
    gradient="it serves inference; differentiate x @ W.T in float32 instead",
)
