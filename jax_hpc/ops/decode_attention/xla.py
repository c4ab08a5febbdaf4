"""XLA's best form of decode_attention: the page table in blocks, with an online softmax.

It reads no further than the longest sequence reaches and starts at the first window, and holds
one block of the cache at a time, however wide the page table is.
"""

import functools

import jax
import jax.numpy as jnp

from jax_hpc.ops import _paged_attention as paged
from jax_hpc.ops.decode_attention import reference
from jax_hpc.ops.decode_attention.heuristics import block_pages
from jax_hpc.ops.decode_attention.signature import Operands, Params, Results, shape_rule


def decode_attention(operands: Operands, params: Params) -> Results:
    o = operands
    _, num_kv_heads, page_size, head_dim = o.k_pages.shape
    batch, width = o.page_table.shape
    pages = block_pages(
        batch=batch, num_kv_heads=num_kv_heads, page_size=page_size, head_dim=head_dim
    )
    if width <= pages:
        return reference.decode_attention(operands, params)
    q = paged.query_values(o.q, o.q_scale, o.k_pages.dtype)
    positions = reference.query_positions(o.kv_lens, q.shape[1])
    table = jnp.pad(o.page_table, ((0, 0), (0, -width % pages)), constant_values=-1)
    extend = jax.vmap(
        functools.partial(paged.extend_running, scale=params.scale, logit_cap=params.logit_cap)
    )

    def step(block: jax.Array, state: paged.Running) -> paged.Running:
        ids = jax.lax.dynamic_slice_in_dim(table, block * pages, pages, axis=1)
        k = paged.gather_tokens(o.k_pages, ids, o.k_scale)
        v = paged.gather_tokens(o.v_pages, ids, o.v_scale)
        keys = block * (pages * page_size) + jnp.arange(pages * page_size, dtype=jnp.int32)
        visible = paged.sees(positions, keys, params.window)
        visible &= paged.in_pool(ids, o.k_pages)[:, None, :]
        return extend(state, q, k, v, visible)

    first, end = block_range(positions, params.window, pages * page_size, table.shape[1] // pages)
    start = jax.vmap(functools.partial(paged.start_running, num_kv_heads=num_kv_heads))(q)
    state = jax.lax.fori_loop(first, end, step, start)
    out, lse = jax.vmap(paged.finish_running, in_axes=(0, None))(state, o.sinks)
    shapes = shape_rule(operands, params)
    return Results(out.astype(shapes.out.dtype), lse if params.return_lse else None)


def block_range(
    positions: jax.Array, window: int | None, tokens: int, blocks: int
) -> tuple[jax.Array, jax.Array]:
    """First and end block that any query of any sequence sees."""
    end = jnp.clip(jnp.max(positions, initial=-1) // tokens + 1, 0, blocks)
    if window is None:
        return jnp.zeros_like(end), end
    # A sequence without a key sees nothing, and must not pull the first block to 0.
    lowest = jnp.where(positions[:, -1] >= 0, positions[:, 0] - (window - 1), 2**31 - 1)
    return jnp.clip(jnp.min(lowest, initial=2**31 - 1) // tokens, 0, blocks), end
