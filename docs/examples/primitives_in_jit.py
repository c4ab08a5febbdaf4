"""A decode step of your own: one layer of attention and experts, from the operators alone."""

import functools

import jax
import jax.numpy as jnp

from jax_hpc import (
    DenseExperts,
    decode_attention,
    fused_moe,
    qk_norm_rope_append,
    rope_table,
    router_topk,
    split_router_weight,
)
from jax_hpc.cache import slots_of

BATCH, HIDDEN = 2, 128
Q_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
EXPERTS, TOP_K, INTERMEDIATE = 8, 2, 64
PAGE_SIZE, PAGES_PER_SEQUENCE = 16, 2


@functools.partial(jax.jit, static_argnames="dtype")
def init(key, dtype=jnp.bfloat16):
    """Random weights of the layer."""

    def normal(key, *shape, fan_in):
        return (jax.random.normal(key, shape) * fan_in**-0.5).astype(dtype)

    qkv, o, router, gate_up, down = jax.random.split(key, 5)
    router = jax.random.normal(router, (EXPERTS, HIDDEN)) * HIDDEN**-0.5
    return {
        "qkv": normal(qkv, HIDDEN, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, fan_in=HIDDEN),
        "q_norm": jnp.ones(HEAD_DIM, dtype),
        "k_norm": jnp.ones(HEAD_DIM, dtype),
        "o": normal(o, Q_HEADS * HEAD_DIM, HIDDEN, fan_in=Q_HEADS * HEAD_DIM),
        "router": split_router_weight(router),
        "experts": DenseExperts(
            gate_up=normal(gate_up, EXPERTS, 2, INTERMEDIATE, HIDDEN, fan_in=HIDDEN),
            down=normal(down, EXPERTS, HIDDEN, INTERMEDIATE, fan_in=INTERMEDIATE),
        ),
        "cos_sin": jnp.asarray(rope_table(PAGE_SIZE * PAGES_PER_SEQUENCE, HEAD_DIM, 1e4)),
    }


def rms_norm(x):
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def layer(weights, x, cache, page_table, lens):
    """One new token per sequence, x [B, H], at position lens [B]: -> (y [B, H], cache)."""
    slots = slots_of(page_table, lens, PAGE_SIZE)
    # Rotates q, appends k and v to the pages. With several layers, decode_schedule gives a work
    # split that all of them share; one layer alone lets decode_attention make its own.
    q, _, *cache, _ = qk_norm_rope_append(
        rms_norm(x) @ weights["qkv"],
        weights["q_norm"],
        weights["k_norm"],
        weights["cos_sin"],
        lens,
        slots,
        *cache,
    )
    attended = decode_attention(q, *cache, page_table, lens + 1)
    x = x + attended.reshape(BATCH, -1) @ weights["o"]

    normalised = rms_norm(x)
    route = router_topk(normalised, weights["router"], TOP_K, renormalize=True)
    return x + fused_moe(normalised, route.ids, route.weights, weights["experts"]), tuple(cache)


@functools.partial(jax.jit, static_argnames="steps", donate_argnames="cache")
def decode(weights, x, cache, page_table, lens, *, steps):
    """Many steps in one jit. Hidden states stand in for tokens: each output is the next input."""

    def step(carry, _):
        x, cache, lens = carry
        y, cache = layer(weights, x, cache, page_table, lens)
        return (y, cache, lens + 1), y

    (_, cache, lens), outputs = jax.lax.scan(step, (x, cache, lens), length=steps)
    return outputs, cache, lens


def new_cache(dtype=jnp.bfloat16):
    """K and V pages; each its own buffer, made outside jit, so that both can be donated."""
    shape = (BATCH * PAGES_PER_SEQUENCE, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def main():
    weights = init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (BATCH, HIDDEN), jnp.bfloat16)
    page_table = jnp.arange(BATCH * PAGES_PER_SEQUENCE, dtype=jnp.int32).reshape(BATCH, -1)
    lens = jnp.zeros(BATCH, jnp.int32)

    cache = new_cache()
    before = {pages.unsafe_buffer_pointer() for pages in cache}
    outputs, cache, lens = decode(weights, x, cache, page_table, lens, steps=20)
    after = {pages.unsafe_buffer_pointer() for pages in cache}

    print(f"outputs {outputs.shape} {outputs.dtype}, finite: {bool(jnp.isfinite(outputs).all())}")
    print(f"tokens in the cache: {lens.tolist()}, updated in place: {before == after}")


if __name__ == "__main__":
    main()
