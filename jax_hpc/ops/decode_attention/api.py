"""Public function of decode_attention."""

from typing import Any, Literal

import jax

from jax_hpc._checks import Dims, check
from jax_hpc.ops._paged_checks import (
    MAX_Q_LEN,
    check_paged_attention,
    normalize_count,
    normalize_options,
    normalize_scales,
)
from jax_hpc.ops.decode_attention.primitive import OPERATOR
from jax_hpc.ops.decode_attention.schedule import DecodeSchedule
from jax_hpc.ops.decode_attention.signature import Operands, Params
from jax_hpc.types import Implementation

_NAME = "decode_attention"


def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    schedule: DecodeSchedule | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    logit_cap: float | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    num_splits: int | Literal["static"] | None = None,
    return_lse: bool = False,
    implementation: Implementation = "auto",
) -> Any:
    """Attention of a decode step over the paged KV cache (grouped-query, causal).

    The S newest tokens of each sequence, already in the cache, attend to it: query token s of a
    sequence of length len sits at position ``i = len - S + s`` and sees the keys ``j <= i``,
    with a window those with ``j > i - window``. In this order: ``s = scale * q . k``, then
    ``logit_cap * tanh(s / logit_cap)``, the mask, and the sink in the denominator. A query that
    sees no key gives zeros, with log-sum-exp -inf, also with a sink.

    What no query of a sequence sees never matters: page-table entries at and beyond
    ``ceil(len / N)`` may be anything, slots never written may hold NaN, and a page id outside
    ``[0, P)`` within the length masks its tokens. Pages may be shared between sequences.

    Args:
      q: ``[B, S, Hq, D]`` or, for S = 1, ``[B, Hq, D]``; bfloat16, float32 or, with q_scale and
        an fp8 cache, float8_e4m3fn. S is 1 to 8. On an fp8 cache q of another dtype is quantised
        per token and head first, as by :mod:`jax_hpc.fp8`.
      k_pages, v_pages: ``[P, Hkv, N, D]`` bfloat16, float8_e4m3fn or float32; Hq a multiple of
        Hkv.
      page_table: int32 ``[B, M]``; token t of sequence b lies in row ``t % N`` of page
        ``page_table[b, t // N]``.
      kv_lens: int32 ``[B]``, tokens in the cache including the S new ones, at most M * N; 0 (or
        less) for an empty row of a padded batch.
      schedule: of :func:`decode_schedule` for the same lengths and shapes, shared by all layers;
        None to let the kernel's launch make its own.
      scale: of q . k; None for ``D ** -0.5``.
      window: keys that a query sees, itself included, or None for all.
      sinks: float32 ``[Hq]``, a logit per head that joins the denominator (GPT-OSS); log-sum-exp
        includes it.
      logit_cap: soft cap of the scores (Gemma 2), or None.
      q_scale: float32 ``[B, S, Hq]`` (``[B, Hq]``), with fp8 q only.
      k_scale: of an fp8 cache, float32: per tensor ``[]`` or a number, per head ``[Hkv]``, or per
        token and head ``[P, Hkv, N]``. None for 1. Scales multiply.
      v_scale: of an fp8 cache, float32 ``[]``, a number, or ``[Hkv]``. None for 1.
      num_splits: instead of a schedule, how a kernel cuts each sequence: "static" into a number
        of splits that depends on B (the classic split-KV), an int k into k by the sequence's own
        length alone, so that a result's bits do not depend on its batch. The XLA form has no
        splits and does not promise that: XLA picks its products by the whole batch's shape.
      return_lse: also return the log-sum-exp.
      implementation: see :data:`jax_hpc.types.Implementation`.

    Returns:
      Output shaped as q, in q's dtype (bfloat16 for fp8 q); with return_lse ``(output, lse)``,
      lse float32 ``[B, S, Hq]`` (``[B, Hq]``), natural logarithm.

    Raises:
      ValueError: shapes or values do not fit, schedule and num_splits are both given, or the
        schedule was built for another call.
      TypeError: a dtype is not supported, or a static argument is not a Python number.
      NotImplementedError: ``implementation="cuda"`` and no kernel takes the case.
    """
    dims = Dims(_NAME)
    single = getattr(q, "ndim", 4) == 3
    dims.match("q", q, "B Hq D" if single else "B S Hq D")
    if single:
        dims.bind("S", 1, "q")
    tokens = dims["S"]
    check(1 <= tokens <= MAX_Q_LEN, _NAME, "q", expected="of 1 <= S <= 8", got=f"S = {tokens}")
    check_paged_attention(
        _NAME,
        dims,
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        kv_lens=kv_lens,
        sinks=sinks,
    )
    q_scale, k_scale, v_scale = normalize_scales(
        _NAME,
        dims,
        q=q,
        cache_dtype=k_pages.dtype,
        q_scale_axes="B Hq" if single else "B S Hq",
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    options = normalize_options(
        _NAME, head_dim=dims["D"], scale=scale, window=window, logit_cap=logit_cap
    )
    splits = _normalize_splits(num_splits, schedule)
    if schedule is not None:
        _check_schedule(schedule, dims, k_pages.dtype.name, options.window)
    if single:
        q, q_scale = q[:, None], None if q_scale is None else q_scale[:, None]
    results = OPERATOR(
        Operands(
            q, k_pages, v_pages, page_table, kv_lens, schedule, sinks, q_scale, k_scale, v_scale
        ),
        Params(*options, splits, bool(return_lse)),
        implementation=implementation,
    )
    if single:
        results = jax.tree.map(lambda x: x[:, 0], results)
    return results.out if results.lse is None else (results.out, results.lse)


def _normalize_splits(num_splits: Any, schedule: DecodeSchedule | None) -> int | str | None:
    if num_splits is not None and num_splits != "static":
        num_splits = normalize_count(_NAME, "num_splits", num_splits, also="None, 'static' or ")
    check(
        num_splits is None or schedule is None,
        _NAME,
        "num_splits",
        expected="None with a schedule, which has cut the keys already",
        got=repr(num_splits),
    )
    return num_splits


def _check_schedule(schedule: Any, dims: Dims, kv_dtype: str, window: int | None) -> None:
    """Every static field of a schedule must describe this call."""
    if not isinstance(schedule, DecodeSchedule):
        raise TypeError(
            f"{_NAME}: argument 'schedule' must be a DecodeSchedule (see decode_schedule), got "
            f"{type(schedule).__name__}"
        )
    call = {
        "batch": dims["B"],
        "num_q_heads": dims["Hq"],
        "num_kv_heads": dims["Hkv"],
        "head_dim": dims["D"],
        "kv_dtype": kv_dtype,
        "page_size": dims["N"],
        "q_len": dims["S"],
        "window": window,
    }
    for field, value in call.items():
        built = getattr(schedule, field)
        check(
            built == value,
            _NAME,
            f"schedule.{field}",
            expected=f"{value!r} as in this call",
            got=repr(built),
        )
