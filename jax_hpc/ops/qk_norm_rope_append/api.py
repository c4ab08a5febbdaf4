"""Public function of qk_norm_rope_append."""

import functools
import math

import jax
import jax.numpy as jnp

from jax_hpc._checks import Dims, check, check_choice, check_dtype, static_number
from jax_hpc.ops._paged_checks import CACHE_DTYPES, normalize_cache_scale
from jax_hpc.ops.qk_norm_rope_append.primitive import OPERATOR
from jax_hpc.ops.qk_norm_rope_append.signature import (
    NORMS,
    ROPE_STYLES,
    Operands,
    Params,
    PrologueOut,
)
from jax_hpc.types import Implementation

_OPERATOR = "qk_norm_rope_append"


def qk_norm_rope_append(
    qkv: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    cos_sin: jax.Array,
    positions: jax.Array,
    slots: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    *,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    k_scale_pages: jax.Array | None = None,
    eps: float = 1e-6,
    norm: str | None = "before",
    rope_style: str = "half",
    quantize_q: bool = False,
    implementation: Implementation = "auto",
) -> PrologueOut:
    """From the QKV projection to rotated queries and a cache that holds the new tokens.

    Per head of q and k: ``x / sqrt(mean(x^2) + eps) * weight`` and the rotary embedding, in the
    order that ``norm`` says; then k and v go to row ``slot % N`` of page ``slot // N``. All in
    float32, each value rounded once, where it is stored.

    The caches are written in place if the enclosing jit donates them (or carries them in a
    loop) and their old values are not used afterwards. Two tokens of one call must not share a
    slot: which of them stays is undefined.

    An fp8 cache holds ``x / scale`` saturated at +-448. For k the scale is ``k_scale``, or, with
    ``k_scale_pages``, ``amax / 448`` of each token and head, which is written there. With
    ``quantize_q`` the queries are quantised per token and head in the same way.

    Args:
      qkv: ``[T, (Hq + 2 Hkv) * D]`` bf16 or float32: q heads, k heads, v heads.
      q_norm, k_norm: ``[D]`` bf16 or float32, or None for no weight.
      cos_sin: ``[positions, rotary]`` float32, ``cos[rotary / 2]`` then ``sin[rotary / 2]``
        whatever the style (:func:`jax_hpc.rope_table`). rotary <= D values of a head are
        rotated.
      positions: ``[T]`` int32, clamped to the table.
      slots: ``[T]`` int32, ``page * N + row``. Outside [0, P * N), such as -1: the token is not
        written, its q is.
      k_pages, v_pages: ``[P, Hkv, N, D]`` bf16, float32 or float8_e4m3fn.
      k_scale: scale of an fp8 K cache, float32 ``[]`` or ``[Hkv]``; 1 if absent.
      v_scale: scale of an fp8 V cache, float32 ``[]`` or ``[Hkv]``; 1 if absent.
      k_scale_pages: ``[P, Hkv, N]`` float32: K is quantised per token and head.
      eps: of the norm.
      norm: ``"before"`` RoPE (Qwen3, Hy3), ``"after"`` it, or None.
      rope_style: ``"half"`` pairs value i with i + rotary / 2, ``"interleaved"`` 2i with 2i + 1.
      quantize_q: return q as float8_e4m3fn with its scales.
      implementation: see :data:`jax_hpc.types.Implementation`.

    Returns:
      :class:`PrologueOut`.

    Raises:
      ValueError: shapes or values do not fit.
      TypeError: a dtype is not supported, or eps is not a Python number.
      NotImplementedError: ``implementation="cuda"`` and no kernel takes the case.
    """
    operands = Operands(
        qkv=qkv,
        q_norm=q_norm,
        k_norm=k_norm,
        cos_sin=cos_sin,
        positions=positions,
        slots=slots,
        k_pages=k_pages,
        v_pages=v_pages,
        k_scale=None,
        v_scale=None,
        k_scale_pages=None,
    )
    check_choice(_OPERATOR, "norm", norm, NORMS)
    check_choice(_OPERATOR, "rope_style", rope_style, ROPE_STYLES)
    eps = static_number(_OPERATOR, "eps", eps)
    check(math.isfinite(eps) and eps >= 0, _OPERATOR, "eps", expected="finite and >= 0", got=eps)
    dims = Dims(_OPERATOR)
    _check_caches(dims, operands)
    operands = _with_scales(dims, operands, k_scale, v_scale, k_scale_pages)
    _check_tokens(dims, operands)
    _check_norms(dims, operands, norm)
    params = Params(eps, norm, rope_style, bool(quantize_q))
    return OPERATOR(operands, params, implementation=implementation)


def _check_caches(dims: Dims, operands: Operands) -> None:
    dims.match("k_pages", operands.k_pages, "P Hkv N D")
    dims.match("v_pages", operands.v_pages, "P Hkv N D")
    check_dtype(_OPERATOR, "k_pages", operands.k_pages, CACHE_DTYPES)
    check_dtype(_OPERATOR, "v_pages", operands.v_pages, CACHE_DTYPES)
    rows = dims["P"] * dims["N"]
    check(
        rows < 2**31,
        _OPERATOR,
        "k_pages",
        expected="of fewer than 2^31 slots P * N, since slots are int32",
        got=rows,
    )


def _with_scales(
    dims: Dims,
    operands: Operands,
    k_scale: jax.Array | float | None,
    v_scale: jax.Array | float | None,
    k_scale_pages: jax.Array | None,
) -> Operands:
    """The operands with their scales, which fit the caches; numbers become float32 scalars."""
    k_dtype, v_dtype = operands.k_pages.dtype, operands.v_pages.dtype
    scale = functools.partial(normalize_cache_scale, _OPERATOR, dims)
    operands = operands._replace(
        k_scale=scale(k_dtype, "k_scale", k_scale, ("", "Hkv")),
        v_scale=scale(v_dtype, "v_scale", v_scale, ("", "Hkv")),
        k_scale_pages=scale(k_dtype, "k_scale_pages", k_scale_pages, ("P Hkv N",)),
    )
    check(
        operands.k_scale is None or operands.k_scale_pages is None,
        _OPERATOR,
        "k_scale",
        expected="None when k_scale_pages is given (scales are then computed per token)",
        got="both",
    )
    return operands


def _check_tokens(dims: Dims, operands: Operands) -> None:
    dims.match("qkv", operands.qkv, "T width")
    check_dtype(_OPERATOR, "qkv", operands.qkv, (jnp.bfloat16, jnp.float32))
    head_dim, kv_heads, width = dims["D"], dims["Hkv"], dims["width"]
    check(
        head_dim > 0 and width % head_dim == 0 and width // head_dim > 2 * kv_heads,
        _OPERATOR,
        "qkv",
        expected=f"of width (Hq + 2 Hkv) * D with Hkv = {kv_heads}, D = {head_dim} and Hq >= 1",
        got=width,
    )
    dims.match("positions", operands.positions, "T")
    dims.match("slots", operands.slots, "T")
    check_dtype(_OPERATOR, "positions", operands.positions, (jnp.int32,))
    check_dtype(_OPERATOR, "slots", operands.slots, (jnp.int32,))
    dims.match("cos_sin", operands.cos_sin, "positions rotary")
    check_dtype(_OPERATOR, "cos_sin", operands.cos_sin, (jnp.float32,))
    check(dims["positions"] > 0, _OPERATOR, "cos_sin", expected="of at least one row", got=0)
    check(
        dims["rotary"] % 2 == 0 and dims["rotary"] <= head_dim,
        _OPERATOR,
        "cos_sin",
        expected=f"of an even width <= D = {head_dim}",
        got=dims["rotary"],
    )


def _check_norms(dims: Dims, operands: Operands, norm: str | None) -> None:
    for argument, weight in (("q_norm", operands.q_norm), ("k_norm", operands.k_norm)):
        if weight is None:
            continue
        dims.match(argument, weight, "D")
        check_dtype(_OPERATOR, argument, weight, (jnp.bfloat16, jnp.float32))
        check(
            norm is not None, _OPERATOR, argument, expected="None when norm=None", got="an array"
        )
