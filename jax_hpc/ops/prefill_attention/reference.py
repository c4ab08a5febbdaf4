"""Truth of prefill_attention: one sequence after the other, all its keys at once."""

import jax
import jax.numpy as jnp

from jax_hpc.ops import _paged_attention as paged
from jax_hpc.ops.prefill_attention.signature import Operands, Params, Results, shape_rule


def prefill_attention(operands: Operands, params: Params) -> Results:
    o = operands
    if nothing_to_do(o):
        return empty_results(operands, params)
    q = paged.query_values(o.q, o.q_scale, o.k_pages.dtype)

    def sequence(index: jax.Array, results: Results) -> Results:
        table = o.page_table[index]
        k = paged.gather_tokens(o.k_pages, table, o.k_scale)
        v = paged.gather_tokens(o.v_pages, table, o.v_scale)
        row = jnp.arange(params.max_q_len, dtype=jnp.int32)
        source, position = locate(o, index, row, params.max_q_len)
        visible = paged.sees(position, jnp.arange(k.shape[1], dtype=jnp.int32), params.window)
        visible &= paged.in_pool(table, o.k_pages)
        out, lse = paged.attend(
            take_rows(q, source),
            k,
            v,
            visible,
            o.sinks,
            scale=params.scale,
            logit_cap=params.logit_cap,
        )
        return put_rows(results, source, out, lse)

    empty = empty_results(operands, params)
    return jax.lax.fori_loop(0, o.page_table.shape[0], sequence, empty)


def nothing_to_do(o: Operands) -> bool:
    """Whether an empty axis leaves no row or no key at all."""
    return 0 in (o.q.shape[0], *o.page_table.shape)


def locate(
    o: Operands, index: jax.Array, row: jax.Array, max_q_len: int
) -> tuple[jax.Array, jax.Array]:
    """Row of q and position of a sequence's chunk rows; T and -1 for rows that do not exist.

    A negative position sees no key.
    """
    tokens = o.q.shape[0]
    length = o.q_lens[index]
    source = o.q_starts[index] + row
    exists = (row < jnp.minimum(length, max_q_len)) & (source >= 0) & (source < tokens)
    position = jnp.maximum(o.kv_lens[index], 0) - length + row
    return jnp.where(exists, source, tokens), jnp.where(exists, position, -1)


def take_rows(q: jax.Array, source: jax.Array) -> jax.Array:
    """Rows of q; zeros where there is none."""
    return jnp.take(q, source, axis=0, mode="fill", fill_value=0)


def put_rows(results: Results, source: jax.Array, out: jax.Array, lse: jax.Array) -> Results:
    """Write a sequence's rows into the results; rows that do not exist fall away."""
    return Results(
        results.out.at[source].set(out.astype(results.out.dtype), mode="drop"),
        None if results.lse is None else results.lse.at[source].set(lse, mode="drop"),
    )


def empty_results(operands: Operands, params: Params) -> Results:
    """Results before any sequence: what rows of no sequence keep."""
    shapes = shape_rule(operands, params)
    out = jnp.zeros(shapes.out.shape, shapes.out.dtype)
    lse = None if shapes.lse is None else jnp.full(shapes.lse.shape, -jnp.inf, jnp.float32)
    return Results(out, lse)
