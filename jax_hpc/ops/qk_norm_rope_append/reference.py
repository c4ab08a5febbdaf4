"""Truth of qk_norm_rope_append: float32 throughout, one rounding where a value is stored."""

import jax
import jax.numpy as jnp

from jax_hpc import fp8
from jax_hpc.ops.qk_norm_rope_append.signature import (
    Operands,
    Params,
    PrologueOut,
    num_q_heads,
)


def qk_norm_rope_append(operands: Operands, params: Params) -> PrologueOut:
    _, kv_heads, page_size, head_dim = operands.k_pages.shape
    heads = num_q_heads(operands)
    tokens, total_heads = operands.qkv.shape[0], heads + 2 * kv_heads
    rows = operands.qkv.reshape(tokens, total_heads, head_dim).astype(jnp.float32)
    q, k, v = jnp.split(rows, [heads, heads + kv_heads], axis=1)

    # A padded token may carry any position: it reads the table's first or last row.
    table = jnp.take(operands.cos_sin, operands.positions, axis=0, mode="clip")
    q = _norm_and_rotate(q, operands.q_norm, table, params)
    k = _norm_and_rotate(k, operands.k_norm, table, params)

    q_scale = None
    if params.quantize_q:
        q_scale = fp8.amax_scale(q, axis=2)
        q = fp8.quantize(q, q_scale[:, :, None])
    else:
        q = q.astype(operands.qkv.dtype)

    # Floor division puts a slot below 0 or beyond the cache on a page that does not exist, and
    # the scatter drops its row.
    page, row = operands.slots // page_size, operands.slots % page_size
    k_scale, k_scale_pages = operands.k_scale, operands.k_scale_pages
    if k_scale_pages is not None:
        k_scale = fp8.amax_scale(k, axis=2)
        k_scale_pages = _write(k_scale_pages, page, row, k_scale)
    return PrologueOut(
        q=q,
        q_scale=q_scale,
        k_pages=_write(operands.k_pages, page, row, _stored(k, operands.k_pages.dtype, k_scale)),
        v_pages=_write(
            operands.v_pages, page, row, _stored(v, operands.v_pages.dtype, operands.v_scale)
        ),
        k_scale_pages=k_scale_pages,
    )


def _norm_and_rotate(
    x: jax.Array, weight: jax.Array | None, table: jax.Array, params: Params
) -> jax.Array:
    if params.norm == "before":
        x = _rms_norm(x, weight, params.eps)
    x = _rotate(x, table[:, None, :], params.rope_style)
    if params.norm == "after":
        x = _rms_norm(x, weight, params.eps)
    return x


def _rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x if weight is None else x * weight.astype(jnp.float32)


def _rotate(x: jax.Array, table: jax.Array, style: str) -> jax.Array:
    """Rotate the first ``rotary`` of D values in pairs; the rest passes through."""
    rotary = table.shape[-1]
    cos, sin = jnp.split(table, 2, axis=-1)
    turned, rest = x[..., :rotary], x[..., rotary:]
    if style == "half":  # pairs (i, i + rotary/2)
        first, second = jnp.split(turned, 2, axis=-1)
    else:  # pairs (2i, 2i + 1)
        first, second = turned[..., 0::2], turned[..., 1::2]
    pair = (first * cos - second * sin, second * cos + first * sin)
    if style == "half":
        turned = jnp.concatenate(pair, axis=-1)
    else:
        turned = jnp.stack(pair, axis=-1).reshape(turned.shape)
    return jnp.concatenate([turned, rest], axis=-1)


def _stored(x: jax.Array, dtype: jnp.dtype, scale: jax.Array | None) -> jax.Array:
    """K or V ``[T, Hkv, D]`` in the cache's dtype; the scale is [], [Hkv] or [T, Hkv]."""
    if dtype != fp8.E4M3:
        return x.astype(dtype)
    scale = jnp.ones((), jnp.float32) if scale is None else scale
    return fp8.quantize(x, scale if scale.ndim == 0 else scale[..., None])


def _write(cache: jax.Array, page: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
    """``cache[page, :, row] = values``, in place, in the cache's stored shape.

    A reshape of the cache ahead of the scatter would copy it. fp8 goes as bytes: XLA's CPU
    backend scatters fp8 by converting the whole cache to float16 and back.
    """
    dtype = cache.dtype
    if dtype == fp8.E4M3:
        cache = jax.lax.bitcast_convert_type(cache, jnp.uint8)
        values = jax.lax.bitcast_convert_type(values, jnp.uint8)
    cache = cache.at[page, :, row].set(values, mode="drop", wrap_negative_indices=False)
    return jax.lax.bitcast_convert_type(cache, dtype) if dtype == fp8.E4M3 else cache
