"""Argument checks that the operators over the paged KV cache share."""

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_hpc._checks import Dims, check, check_dtype, describe, static_int, static_number
from jax_hpc.fp8 import E4M3

CACHE_DTYPES = (jnp.bfloat16, jnp.float32, E4M3)
MAX_Q_LEN = 8
"""Query tokens per sequence of a decode step: one, and the draft tokens being verified."""
INT32_MAX = 2**31 - 1


class Scales(NamedTuple):
    q: jax.Array | None
    k: jax.Array | None
    v: jax.Array | None


class Options(NamedTuple):
    scale: float
    window: int | None
    logit_cap: float | None


def check_paged_attention(
    operator: str,
    dims: Dims,
    *,
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    kv_lens: Any,
    sinks: Any,
) -> None:
    """Shapes and dtypes of a paged attention, q's axes being bound already."""
    check_dtype(operator, "q", q, CACHE_DTYPES)
    dims.match("k_pages", k_pages, "P Hkv N D")
    check_dtype(operator, "k_pages", k_pages, CACHE_DTYPES)
    sizes = min(dims["N"], dims["D"])
    check(sizes >= 1, operator, "k_pages", expected="of N, D >= 1", got=tuple(k_pages.shape))
    dims.match("v_pages", v_pages, "P Hkv N D")
    check_dtype(operator, "v_pages", v_pages, (k_pages.dtype,))
    dims.match("page_table", page_table, "B M")
    check_dtype(operator, "page_table", page_table, (jnp.int32,))
    dims.match("kv_lens", kv_lens, "B")
    check_dtype(operator, "kv_lens", kv_lens, (jnp.int32,))
    check_heads(operator, "q", dims["Hq"], dims["Hkv"])
    if sinks is not None:
        dims.match("sinks", sinks, "Hq")
        check_dtype(operator, "sinks", sinks, (jnp.float32,))


def check_heads(operator: str, argument: str, num_q_heads: int, num_kv_heads: int) -> None:
    check(
        min(num_q_heads, num_kv_heads) >= 1 and num_q_heads % num_kv_heads == 0,
        operator,
        argument,
        expected=f"of query heads in a multiple of Hkv = {num_kv_heads}",
        got=f"Hq = {num_q_heads}",
    )


def normalize_scales(
    operator: str,
    dims: Dims,
    *,
    q: Any,
    cache_dtype: Any,
    q_scale_axes: str,
    q_scale: Any,
    k_scale: Any,
    v_scale: Any,
) -> Scales:
    """Check the scales of an fp8 cache; Python numbers become float32 scalars."""
    fp8_cache = jnp.dtype(cache_dtype) == jnp.dtype(E4M3)
    fp8_query = q.dtype == jnp.dtype(E4M3)
    if fp8_query and not fp8_cache:
        raise TypeError(
            f"{operator}: argument 'q' must be bfloat16 or float32 on a cache of "
            f"{jnp.dtype(cache_dtype).name}, got {q.dtype.name}"
        )
    check(
        fp8_query == (q_scale is not None),
        operator,
        "q_scale",
        expected=f"float32 [{', '.join(q_scale_axes.split())}] with fp8 q, and None otherwise",
        got=f"{describe(q_scale)} with q of {q.dtype.name}",
    )
    if q_scale is not None:
        dims.match("q_scale", q_scale, q_scale_axes)
        check_dtype(operator, "q_scale", q_scale, (jnp.float32,))
    check_scale = functools.partial(normalize_cache_scale, operator, dims, cache_dtype)
    return Scales(
        q_scale,
        check_scale("k_scale", k_scale, ("", "Hkv", "P Hkv N")),
        check_scale("v_scale", v_scale, ("", "Hkv")),
    )


def normalize_cache_scale(
    operator: str, dims: Dims, cache_dtype: Any, argument: str, value: Any, kinds: Sequence[str]
) -> jax.Array | None:
    """Check a scale of a cache, of one of the shapes ``kinds``; only fp8 caches have any.

    A Python or NumPy number becomes a float32 scalar where "" is among the kinds.
    """
    if value is None:
        return None
    check(
        jnp.dtype(cache_dtype) == jnp.dtype(E4M3),
        operator,
        argument,
        expected=f"None on a cache of {jnp.dtype(cache_dtype).name}, which has no scales",
        got=describe(value),
    )
    if "" in kinds and isinstance(value, numbers.Real | np.number):
        return jnp.asarray(value, jnp.float32)
    check_dtype(operator, argument, value, (jnp.float32,))
    by_rank = {len(axes.split()): axes for axes in kinds}
    listed = " or ".join(f"[{', '.join(axes.split())}]" for axes in kinds)
    check(
        value.ndim in by_rank,
        operator,
        argument,
        expected=f"of shape {listed}",
        got=tuple(value.shape),
    )
    dims.match(argument, value, by_rank[value.ndim])
    return value


def normalize_options(
    operator: str, *, head_dim: int, scale: Any, window: Any, logit_cap: Any
) -> Options:
    """Check the static options of an attention and give them their Python types."""
    scale = head_dim**-0.5 if scale is None else static_number(operator, "scale", scale)
    check(math.isfinite(scale), operator, "scale", expected="finite", got=scale)
    if logit_cap is not None:
        logit_cap = static_number(operator, "logit_cap", logit_cap)
        valid = math.isfinite(logit_cap) and logit_cap > 0
        check(valid, operator, "logit_cap", expected="None or finite and > 0", got=logit_cap)
    return Options(scale, normalize_window(operator, window), logit_cap)


def normalize_window(operator: str, window: Any) -> int | None:
    """A window of keys per query, or None; wider than any length is as wide as the widest."""
    if window is None:
        return None
    return min(normalize_count(operator, "window", window), INT32_MAX)


def normalize_count(
    operator: str, argument: str, value: Any, *, most: int | None = None, also: str = ""
) -> int:
    """A static Python integer of at least 1."""
    limit = f"1 <= {argument} <= {most}" if most is not None else f"{argument} >= 1"
    value = static_int(operator, argument, value, expected=f"{also}a Python int with {limit}")
    valid = value >= 1 and (most is None or value <= most)
    check(valid, operator, argument, expected=also + limit, got=value)
    return value


def check_cache_dtype(operator: str, argument: str, dtype: Any) -> str:
    """Name of a cache's dtype, given as anything that jnp.dtype takes."""
    listed = " or ".join(jnp.dtype(candidate).name for candidate in CACHE_DTYPES)
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in {jnp.dtype(candidate).name for candidate in CACHE_DTYPES}:
        raise TypeError(f"{operator}: argument '{argument}' must be {listed}, got {name}")
    return name
