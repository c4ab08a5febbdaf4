"""Truth of decode_attention: every sequence's keys gathered at once, then plain attention."""

import functools

import jax
import jax.numpy as jnp

from jax_hpc.ops import _paged_attention as paged
from jax_hpc.ops.decode_attention.signature import Operands, Params, Results, shape_rule


def decode_attention(operands: Operands, params: Params) -> Results:
    o = operands
    q = paged.query_values(o.q, o.q_scale, o.k_pages.dtype)
    k = paged.gather_tokens(o.k_pages, o.page_table, o.k_scale)
    v = paged.gather_tokens(o.v_pages, o.page_table, o.v_scale)
    positions = query_positions(o.kv_lens, q.shape[1])
    visible = paged.sees(positions, jnp.arange(k.shape[2], dtype=jnp.int32), params.window)
    visible &= paged.in_pool(o.page_table, o.k_pages)[:, None, :]
    attend = functools.partial(paged.attend, scale=params.scale, logit_cap=params.logit_cap)
    out, lse = jax.vmap(attend, in_axes=(0, 0, 0, 0, None))(q, k, v, visible, o.sinks)
    shapes = shape_rule(operands, params)
    return Results(out.astype(shapes.out.dtype), lse if params.return_lse else None)


def query_positions(kv_lens: jax.Array, q_len: int) -> jax.Array:
    """Position of each query token ``[B, S]``; negative where a sequence is shorter than S.

    A query sees the keys at or before its own position, so none beyond the length.
    """
    return jnp.maximum(kv_lens, 0)[:, None] - q_len + jnp.arange(q_len, dtype=jnp.int32)
