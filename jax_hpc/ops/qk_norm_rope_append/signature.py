"""What qk_norm_rope_append takes and gives: operands, static parameters, results, shapes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_hpc.fp8 import E4M3

NORMS = ("before", "after", None)
ROPE_STYLES = ("half", "interleaved")


class Operands(NamedTuple):
    qkv: jax.Array
    q_norm: jax.Array | None
    k_norm: jax.Array | None
    cos_sin: jax.Array
    positions: jax.Array
    slots: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    k_scale_pages: jax.Array | None


class PrologueOut(NamedTuple):
    """Queries for attention, and the caches with the new tokens in them.

    q: ``[T, Hq, D]`` in qkv's dtype, or float8_e4m3fn.
    q_scale: float32 ``[T, Hq]`` where q is fp8, else None.
    k_pages, v_pages: ``[P, Hkv, N, D]``, updated.
    k_scale_pages: float32 ``[P, Hkv, N]``, updated, where it was given, else None.
    """

    q: Any
    q_scale: Any
    k_pages: Any
    v_pages: Any
    k_scale_pages: Any


@dataclasses.dataclass(frozen=True)
class Params:
    eps: float
    norm: str | None
    rope_style: str
    quantize_q: bool


def num_q_heads(operands: Operands) -> int:
    """Hq, from qkv's width ``(Hq + 2 Hkv) * D``."""
    _, kv_heads, _, head_dim = operands.k_pages.shape
    return operands.qkv.shape[1] // head_dim - 2 * kv_heads


def shape_rule(operands: Operands, params: Params) -> PrologueOut:
    tokens, head_dim = operands.qkv.shape[0], operands.k_pages.shape[3]
    heads = num_q_heads(operands)
    quantized = params.quantize_q
    return PrologueOut(
        q=jax.ShapeDtypeStruct(
            (tokens, heads, head_dim), E4M3 if quantized else operands.qkv.dtype
        ),
        q_scale=jax.ShapeDtypeStruct((tokens, heads), jnp.float32) if quantized else None,
        k_pages=_like(operands.k_pages),
        v_pages=_like(operands.v_pages),
        k_scale_pages=None if operands.k_scale_pages is None else _like(operands.k_scale_pages),
    )


def _like(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
