"""Top-k, top-p and min-p on the device, without a sort and whatever the batch.

A filter keeps the logits at or above a threshold. The largest threshold that keeps enough of them
is found bit by bit on the ordered integer image of the float32 logits, by counts (top-k) or by
sums of probability (top-p), exact to the last bit. Tokens with equal logits are therefore kept or
dropped together.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_SMALLEST_NORMAL = np.finfo(np.float32).tiny
_STEPS = 16

type _Enough = Callable[[Array], Array]


def allowed_tokens(
    logits: Array, weights: Array, top_k: Array, top_p: Array, min_p: Array
) -> Array:
    """bool [B, V]: the tokens that top-k, then top-p of those, and min-p leave.

    logits: float32 [B, V], finite or -inf.
    weights: float32 [B, V], each token's probability over the row's largest.
    top_k (0 = off), top_p (1 = off), min_p (0 = off): [B].
    """
    order = ordered(logits)
    off = jnp.zeros_like(order[:, 0])
    top_k_used = (top_k > 0) & (top_k < logits.shape[-1])
    by_rank = lax.cond(
        jnp.any(top_k_used),
        lambda: jnp.where(top_k_used, _top_k_threshold(order, top_k), off),
        lambda: off,
    )
    top_p_used = top_p < 1

    def mass_threshold() -> Array:
        kept = jnp.where(order >= by_rank[:, None], weights, 0.0)
        return jnp.where(top_p_used, _top_p_threshold(order, kept, top_p), off)

    by_mass = lax.cond(jnp.any(top_p_used), mass_threshold, lambda: off)
    likely = weights >= min_p[:, None]
    return likely & (order >= jnp.maximum(by_rank, by_mass)[:, None])


def ordered(x: Array) -> Array:
    """uint32 in the order of the float32 values: x < y exactly if ordered(x) < ordered(y)."""
    x = jnp.where(x == 0, 0.0, x)  # one zero: -0.0 has other bits
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def largest_threshold(enough: _Enough, order: Array) -> Array:
    """The largest uint32 threshold of each row of order that keeps enough.

    enough: thresholds [B, 3] -> bool [B, 3]; falls from True to False as a threshold grows.
    """
    lowest = jnp.zeros_like(order[:, 0])
    # XLA records a cond in a CUDA graph only if no loop hides in it, so there the steps are
    # unrolled; elsewhere a loop compiles in a fraction of the time.
    return lax.platform_dependent(
        lowest, cuda=partial(search_unrolled, enough), default=partial(search, enough)
    )


def search(enough: _Enough, threshold: Array) -> Array:
    return lax.fori_loop(0, _STEPS, partial(_search_step, enough), threshold)


def search_unrolled(enough: _Enough, threshold: Array) -> Array:
    for step in range(_STEPS):
        threshold = _search_step(enough, step, threshold)
    return threshold


def _search_step(enough: _Enough, step: Array | int, threshold: Array) -> Array:
    """Fix two more bits, highest first, by three candidates: half as many passes as by one."""
    shift = jnp.uint32(2) * (_STEPS - 1 - jnp.asarray(step)).astype(jnp.uint32)
    digits = jnp.arange(1, 4, dtype=jnp.uint32) << shift
    fits = jnp.sum(enough(threshold[:, None] | digits[None, :]), axis=-1)
    return threshold | (fits.astype(jnp.uint32) << shift)


def _top_k_threshold(order: Array, k: Array) -> Array:
    """The k-th largest of each row, 1 <= k <= V."""

    def enough(thresholds: Array) -> Array:
        kept = order[:, None, :] >= thresholds[:, :, None]
        return jnp.sum(kept, axis=-1, dtype=jnp.int32) >= k[:, None]

    return largest_threshold(enough, order)


def _top_p_threshold(order: Array, weights: Array, top_p: Array) -> Array:
    """The largest threshold that keeps top_p of each row's weight, and at least one token."""
    target = jnp.maximum(top_p * mass(weights), _SMALLEST_NORMAL)

    def enough(thresholds: Array) -> Array:
        kept = order[:, None, :] >= thresholds[:, :, None]
        return mass(jnp.where(kept, weights[:, None, :], 0.0)) >= target[:, None]

    return largest_threshold(enough, order)


def mass(weights: Array) -> Array:
    """Sum of weights in [0, 1] along the last axis, the same bits in whatever order it is added.

    A float32 sum depends on the order, hence on how XLA cuts a batch, and a token at the edge
    of top-p would then depend on its neighbours. So each weight is cut into three integer limbs
    whose sums over the vocabulary fit uint32; together they hold 42 bits below 2^18 tokens.
    """
    limb_bits = min(16, 32 - weights.shape[-1].bit_length())
    base = np.float32(2.0**limb_bits)
    sums = []
    rest = weights
    for _ in range(3):
        scaled = rest * base
        limb = jnp.floor(scaled)
        rest = scaled - limb
        sums.append(jnp.sum(limb.astype(jnp.int32).astype(jnp.uint32), axis=-1))
    high, middle, low = sums
    middle = middle + (low >> limb_bits)
    high = high + (middle >> limb_bits)
    low_bits = jnp.uint32((1 << limb_bits) - 1)
    fraction = (low & low_bits).astype(jnp.float32) / base
    fraction = ((middle & low_bits).astype(jnp.float32) + fraction) / base
    return (high.astype(jnp.float32) + fraction) / base
