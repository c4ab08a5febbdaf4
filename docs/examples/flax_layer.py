"""A decoder layer as a Flax module: paged attention, a router and its experts."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jax_hpc import PagedKVCache, rope_table
from jax_hpc.cache import slots_of
from jax_hpc.nn import FusedMoE, PagedAttention, RMSNorm, SplitRouter
from jax_hpc.step import StepInputs

HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM = 128, 4, 2, 64
EXPERTS, TOP_K, INTERMEDIATE = 8, 2, 64
PAGE_SIZE, MAX_LENGTH = 16, 32


class DecoderLayer(nnx.Module):
    """Pre-norm attention, then pre-norm experts."""

    def __init__(self, *, rngs, dtype=jnp.bfloat16):
        self.attention_norm = RMSNorm(HIDDEN, dtype=dtype)
        self.attention = PagedAttention(
            HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, rngs=rngs, dtype=dtype
        )
        self.experts_norm = RMSNorm(HIDDEN, dtype=dtype)
        self.router = SplitRouter(HIDDEN, EXPERTS, TOP_K, rngs=rngs, renormalize=True)
        self.experts = FusedMoE(HIDDEN, EXPERTS, INTERMEDIATE, rngs=rngs, dtype=dtype)
        self.cos_sin = nnx.Variable(jnp.asarray(rope_table(MAX_LENGTH, HEAD_DIM, 1e4)))

    def __call__(self, x, inputs, pages):
        """x [T, H], the rows that inputs describe: -> (y [T, H], pages with their K and V)."""
        if not inputs.is_prefill:  # in a stack of layers: once, before the first
            inputs = dataclasses.replace(inputs, schedule=self.attention.schedule(inputs, pages))
        y, pages = self.attention(self.attention_norm(x), inputs, pages, self.cos_sin[...])
        x = x + y
        normalised = self.experts_norm(x)
        route = self.router(normalised, inputs.active)
        return x + self.experts(normalised, route.ids, route.weights), pages


def prefill_inputs(page_table, rows, length):
    """The first tokens of one sequence in one step; rows beyond its length are padding."""
    positions = jnp.arange(rows, dtype=jnp.int32)
    slots = slots_of(jnp.repeat(page_table, rows, axis=0), positions, PAGE_SIZE)
    return StepInputs(
        tokens=jnp.zeros(rows, jnp.int32),  # the layer gets hidden states, not tokens
        positions=positions,
        slots=jnp.where(positions < length, slots, -1),
        page_table=page_table,
        kv_lens=jnp.asarray([length], jnp.int32),
        q_starts=jnp.zeros(1, jnp.int32),
        q_lens=jnp.asarray([length], jnp.int32),
        max_q_len=rows,
    )


def decode_inputs(page_table, position):
    """One token at a position."""
    positions = jnp.asarray([position], jnp.int32)
    return StepInputs(
        tokens=jnp.zeros(1, jnp.int32),
        positions=positions,
        slots=slots_of(page_table, positions, PAGE_SIZE),
        page_table=page_table,
        kv_lens=positions + 1,
    )


def main():
    dtype = jnp.float32  # so that the comparison below is sharp; bfloat16 otherwise
    graph, state = nnx.split(DecoderLayer(rngs=nnx.Rngs(0), dtype=dtype))

    def run(state, x, inputs, pages):
        return nnx.merge(graph, state)(x, inputs, pages)

    run = jax.jit(run, donate_argnums=3)

    def new_pages():
        cache = PagedKVCache.zeros(
            num_layers=1,
            num_pages=2,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            page_size=PAGE_SIZE,
            dtype=dtype,
        )
        return cache.layers[0]

    x = jax.random.normal(jax.random.key(1), (20, HIDDEN), dtype)
    page_table = jnp.asarray([[1, 0]], jnp.int32)

    whole, _ = run(state, x, prefill_inputs(page_table, 20, length=20), new_pages())

    _, pages = run(state, x, prefill_inputs(page_table, 20, length=19), new_pages())
    last, pages = run(state, x[19:], decode_inputs(page_table, 19), pages)

    difference = float(jnp.max(jnp.abs(last[0] - whole[19])))
    print(f"prefill of 20 tokens against 19 and one decode step: difference {difference:.1e}")


if __name__ == "__main__":
    main()
