"""Attention over a paged KV cache in jax.numpy: the steps that decode and prefill share.

Everything is float32, with Precision.HIGHEST (a GPU would else multiply in TF32). What a query
does not see is taken out by select and never by multiplication with zero, so that NaN or Inf in
a slot that was never written, or on a page of somebody else, cannot reach a result.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_hpc import fp8

HIGHEST = jax.lax.Precision.HIGHEST


def query_values(q: jax.Array, q_scale: jax.Array | None, cache_dtype: jnp.dtype) -> jax.Array:
    """Queries as float32 ``[..., Hq, D]``, on an fp8 cache quantised per token and head first."""
    if cache_dtype == fp8.E4M3 and q.dtype != fp8.E4M3:
        q_scale = fp8.amax_scale(q, axis=-1)
        q = fp8.quantize(q, q_scale[..., None])
    if q_scale is None:
        return q.astype(jnp.float32)
    return fp8.dequantize(q, q_scale[..., None])


def gather_tokens(pages: jax.Array, ids: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Tokens of the pages ``ids [..., m]`` as float32 ``[..., Hkv, m * N, D]``.

    An id outside the pool gives some page's values; :func:`in_pool` masks them.
    """
    values = _gather(pages, ids).astype(jnp.float32)
    if scale is None:
        return values
    if scale.ndim == 3:
        return values * _gather(scale[..., None], ids)
    return values * scale.reshape(-1, 1, 1)


def _gather(pages: jax.Array, ids: jax.Array) -> jax.Array:
    if pages.shape[0] == 0:
        pages = jnp.zeros((1, *pages.shape[1:]), pages.dtype)
    tiles = jnp.moveaxis(jnp.take(pages, ids, axis=0, mode="clip"), -4, -3)
    *lead, heads, count, size, dim = (*ids.shape[:-1], *tiles.shape[-4:])
    return tiles.reshape(*lead, heads, count * size, dim)


def in_pool(ids: jax.Array, pages: jax.Array) -> jax.Array:
    """Which tokens of the pages ``ids [..., m]`` exist: bool ``[..., m * N]``."""
    valid = (ids >= 0) & (ids < pages.shape[0])
    return jnp.repeat(valid, pages.shape[2], axis=-1)


def sees(query: jax.Array, key: jax.Array, window: int | None) -> jax.Array:
    """Which key positions ``key [c]`` the query positions ``query [..., S]`` see, by position."""
    distance = query[..., None] - key
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    logit_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one sequence: the definition.

    q ``[S, Hq, D]``, k and v ``[Hkv, c, D]``, visible ``[S, c]``, sinks ``[Hq]`` or None
    -> output ``[S, Hq, D]``, log-sum-exp ``[S, Hq]``, all float32.
    """
    scores = masked_scores(q, k, visible, scale=scale, logit_cap=logit_cap)
    largest = jnp.max(scores, axis=-1, initial=-jnp.inf)
    if sinks is not None:
        largest = jnp.maximum(largest, sinks.reshape(largest.shape[1:]))
    base = finite_base(largest)
    weights = jnp.exp(scores - base[..., None])
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks.reshape(base.shape[1:]) - base)
    out = weighted_values(weights, v, visible) / total[..., None]
    return drop_blind(out, base + jnp.log(total), jnp.any(visible, axis=-1))


def masked_scores(
    q: jax.Array, k: jax.Array, visible: jax.Array, *, scale: float, logit_cap: float | None
) -> jax.Array:
    """Scores ``[S, Hkv, G, c]`` after scale, cap and mask, in this order."""
    rows, heads, dim = q.shape
    grouped = q.reshape(rows, k.shape[0], heads // k.shape[0], dim)
    scores = jnp.einsum("shgd,hcd->shgc", grouped, k, precision=HIGHEST) * scale
    if logit_cap is not None:
        scores = logit_cap * jnp.tanh(scores / logit_cap)
    return jnp.where(visible[:, None, None, :], scores, -jnp.inf)


def weighted_values(weights: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """``weights [S, Hkv, G, c]`` times ``v [Hkv, c, D]``, shut to what ``visible [S, c]`` hides.

    A weight of 0 would not do for a hidden NaN or Inf (0 * NaN is NaN). Here a value that is not
    finite makes the rows that see it NaN, and no other.
    """
    finite = jnp.isfinite(v)
    broken = jnp.any(~finite, axis=-1)
    meets = jnp.any(visible[:, None, :] & broken, axis=-1)
    out = jnp.einsum("shgc,hcd->shgd", weights, jnp.where(finite, v, 0.0), precision=HIGHEST)
    return jnp.where(meets[:, :, None, None], jnp.nan, out)


def finite_base(largest: jax.Array) -> jax.Array:
    """What to subtract before exp: the maximum, and 0 where there is none (-inf - -inf is NaN)."""
    return jnp.where(largest == -jnp.inf, 0.0, largest)


def drop_blind(out: jax.Array, lse: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Zeros and -inf for rows without a key (``seen [S]``); heads ``[Hkv, G]`` become ``[Hq]``."""
    rows, dim = out.shape[0], out.shape[-1]
    out = jnp.where(seen[:, None, None, None], out, 0.0)
    lse = jnp.where(seen[:, None, None], lse, -jnp.inf)
    return out.reshape(rows, -1, dim), lse.reshape(rows, -1)


class Running(NamedTuple):
    """Attention over the keys met so far, for S rows of one sequence."""

    largest: jax.Array  # [S, Hkv, G]
    total: jax.Array  # [S, Hkv, G]
    out: jax.Array  # [S, Hkv, G, D], not yet divided by total
    seen: jax.Array  # [S]


def start_running(q: jax.Array, num_kv_heads: int) -> Running:
    """Before the first key."""
    rows, heads, dim = q.shape
    shape = (rows, num_kv_heads, heads // num_kv_heads)
    return Running(
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, dim), jnp.float32),
        jnp.zeros((rows,), bool),
    )


def extend_running(
    state: Running,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    *,
    scale: float,
    logit_cap: float | None,
) -> Running:
    """Take in the keys of one block (online softmax); arguments as in :func:`attend`."""
    scores = masked_scores(q, k, visible, scale=scale, logit_cap=logit_cap)
    largest = jnp.maximum(state.largest, jnp.max(scores, axis=-1))
    base = finite_base(largest)
    weights = jnp.exp(scores - base[..., None])
    old = jnp.exp(state.largest - base)
    return Running(
        largest,
        state.total * old + jnp.sum(weights, axis=-1),
        state.out * old[..., None] + weighted_values(weights, v, visible),
        state.seen | jnp.any(visible, axis=-1),
    )


def finish_running(state: Running, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Output ``[S, Hq, D]`` and log-sum-exp ``[S, Hq]`` after the last key."""
    largest, total, out = state.largest, state.total, state.out
    if sinks is not None:
        sinks = sinks.reshape(largest.shape[1:])
        largest = jnp.maximum(largest, sinks)
        old = jnp.exp(state.largest - finite_base(largest))
        total = total * old + jnp.exp(sinks - finite_base(largest))
        out = out * old[..., None]
    return drop_blind(out / total[..., None], finite_base(largest) + jnp.log(total), state.seen)
