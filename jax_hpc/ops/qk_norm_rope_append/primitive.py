"""qk_norm_rope_append as a JAX primitive."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_hpc._primitive import Fold, Kernel, Operator
from jax_hpc.fp8 import E4M3
from jax_hpc.ops.qk_norm_rope_append import reference
from jax_hpc.ops.qk_norm_rope_append.signature import (
    NORMS,
    ROPE_STYLES,
    Operands,
    Params,
    shape_rule,
)

_HEAD_DIMS = (64, 128, 256)
_MOST_HEADS = 2**31 - 2**10
"""Of all tokens, those of K and V too: the kernel counts in 32-bit integers, and rounds up."""
_MOST_ROWS = 2**32
"""Of a cache, P * Hkv * N: of the least D 256 GiB in fp8."""
_OPTIONAL = ("q_norm", "k_norm", "k_scale", "v_scale", "k_scale_pages")
"""Operands that may be absent, in the order in which the handler takes them: after the others."""


def _unsupported(operands: Operands, params: Params) -> str | None:
    del params
    pages, kv_heads, page_size, head_dim = operands.k_pages.shape
    if operands.qkv.dtype != jnp.bfloat16:
        return f"qkv must be bfloat16, got {operands.qkv.dtype.name}"
    for name, cache in (("k_pages", operands.k_pages), ("v_pages", operands.v_pages)):
        if cache.dtype not in (jnp.bfloat16, E4M3):
            return f"{name} must be bfloat16 or float8_e4m3fn, got {cache.dtype.name}"
    if head_dim not in _HEAD_DIMS:
        return f"D must be one of {_HEAD_DIMS}, got {head_dim}"
    heads = operands.qkv.shape[0] * (operands.qkv.shape[1] // head_dim)
    if heads > _MOST_HEADS:
        return f"T (Hq + 2 Hkv) must be at most {_MOST_HEADS}, got {heads}"
    rows = pages * kv_heads * page_size
    if rows >= _MOST_ROWS:
        return f"P Hkv N must be below {_MOST_ROWS}, got {rows}"
    return None


def _inputs(operands: Operands) -> Sequence[Any]:
    o = operands
    required = [o.qkv, o.cos_sin, o.positions, o.slots, o.k_pages, o.v_pages]
    optional = [getattr(o, name) for name in _OPTIONAL]
    return [*required, *(value for value in optional if value is not None)]


def _attributes(operands: Operands, params: Params) -> Mapping[str, Any]:
    options = {
        "eps": np.float32(params.eps),
        "norm": np.int32(NORMS.index(params.norm)),
        "rope_style": np.int32(ROPE_STYLES.index(params.rope_style)),
    }
    given = {name: getattr(operands, name) is not None for name in _OPTIONAL}
    return {"options": options, "given": given}


KERNEL = Kernel(
    target="jax_hpc.qk_norm_rope_append.v1",
    unsupported=_unsupported,
    attributes=_attributes,
    inputs=_inputs,
    aliases={name: name for name in ("k_pages", "v_pages", "k_scale_pages")},
)

OPERATOR = Operator(
    "qk_norm_rope_append",
    shape_rule=shape_rule,
    reference=reference.qk_norm_rope_append,
    kernel=KERNEL,
    fold=Fold(frozenset({"qkv", "positions", "slots"}), frozenset({"q", "q_scale"})),
    gradient="it writes a cache in place and serves inference; train with plain attention",
)
