"""XLA's best form of prefill_attention: blocks of rows by blocks of keys, with online softmax.

It does the work of the real lengths (a chunk of one row beside one of thousands costs one block
of rows) and holds one block of scores at a time.
"""

import jax
import jax.numpy as jnp

from jax_hpc.ops import _paged_attention as paged
from jax_hpc.ops.prefill_attention import reference
from jax_hpc.ops.prefill_attention.heuristics import block_pages, block_rows
from jax_hpc.ops.prefill_attention.signature import Operands, Params, Results


def prefill_attention(operands: Operands, params: Params) -> Results:
    o = operands
    if reference.nothing_to_do(o):
        return reference.empty_results(operands, params)
    _, num_kv_heads, page_size, _ = o.k_pages.shape
    pages = min(block_pages(page_size), o.page_table.shape[1])
    tokens = pages * page_size
    rows = block_rows(max_q_len=params.max_q_len, num_q_heads=o.q.shape[1], block_tokens=tokens)
    table = jnp.pad(
        o.page_table, ((0, 0), (0, -o.page_table.shape[1] % pages)), constant_values=-1
    )
    q = paged.query_values(o.q, o.q_scale, o.k_pages.dtype)

    def key_block(
        block: jax.Array, state: paged.Running, sequence: jax.Array, q: jax.Array, at: jax.Array
    ) -> paged.Running:
        ids = jax.lax.dynamic_slice(table, (sequence, block * pages), (1, pages))[0]
        k = paged.gather_tokens(o.k_pages, ids, o.k_scale)
        v = paged.gather_tokens(o.v_pages, ids, o.v_scale)
        keys = block * tokens + jnp.arange(tokens, dtype=jnp.int32)
        visible = paged.sees(at, keys, params.window) & paged.in_pool(ids, o.k_pages)
        return paged.extend_running(
            state, q, k, v, visible, scale=params.scale, logit_cap=params.logit_cap
        )

    def row_block(block: jax.Array, results: Results, sequence: jax.Array) -> Results:
        row = block * rows + jnp.arange(rows, dtype=jnp.int32)
        source, position = reference.locate(o, sequence, row, params.max_q_len)
        chunk = reference.take_rows(q, source)
        first, end = _key_blocks(position, params.window, tokens, table.shape[1] // pages)
        state = jax.lax.fori_loop(
            first,
            end,
            lambda i, state: key_block(i, state, sequence, chunk, position),
            paged.start_running(chunk, num_kv_heads),
        )
        return reference.put_rows(results, source, *paged.finish_running(state, o.sinks))

    def one_sequence(sequence: jax.Array, results: Results) -> Results:
        length = jnp.clip(o.q_lens[sequence], 0, params.max_q_len)
        return jax.lax.fori_loop(
            0, (length + rows - 1) // rows, lambda i, r: row_block(i, r, sequence), results
        )

    empty = reference.empty_results(operands, params)
    # int32 bounds: with jax_enable_x64 a Python int would count in int64.
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(table.shape[0]), one_sequence, empty)


def _key_blocks(
    position: jax.Array, window: int | None, tokens: int, blocks: int
) -> tuple[jax.Array, jax.Array]:
    """First and end block of keys that any of the rows sees; rows below 0 see none."""
    end = jnp.clip(jnp.max(position) // tokens + 1, 0, blocks)
    if window is None:
        return jnp.zeros_like(end), end
    lowest = jnp.min(jnp.where(position < 0, 2**31 - 1, position - (window - 1)))
    return jnp.clip(lowest // tokens, 0, blocks), end
