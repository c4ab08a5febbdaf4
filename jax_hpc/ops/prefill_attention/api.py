"""Public function of prefill_attention."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_hpc._checks import Dims, check_dtype
from jax_hpc.ops._paged_checks import (
    check_paged_attention,
    normalize_count,
    normalize_options,
    normalize_scales,
)
from jax_hpc.ops.prefill_attention.primitive import OPERATOR
from jax_hpc.ops.prefill_attention.signature import Operands, Params
from jax_hpc.types import Implementation

_NAME = "prefill_attention"


def prefill_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    q_starts: jax.Array,
    q_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    max_q_len: int,
    scale: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    logit_cap: float | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    return_lse: bool = False,
    implementation: Implementation = "auto",
) -> Any:
    """Causal attention of ragged chunks of prompts over the paged KV cache (grouped-query).

    Sequence b owns the rows ``q_starts[b]`` to ``q_starts[b] + q_lens[b]`` of q; its last query
    is its newest key: row r of the chunk sits at position ``i = kv_lens[b] - q_lens[b] + r`` and
    sees the keys ``j <= i``, with a window those with ``j > i - window``. The chunk's own keys
    are in the cache already. Chunks of one row (decoding sequences) and of thousands may stand
    side by side. Rows of no sequence give zeros, with log-sum-exp -inf. Scores, masks, sinks and
    scales are those of :func:`decode_attention`, as is what never matters.

    Args:
      q: ``[T, Hq, D]`` bfloat16, float32 or, with q_scale and an fp8 cache, float8_e4m3fn. On an
        fp8 cache q of another dtype is quantised per token and head first.
      k_pages, v_pages: ``[P, Hkv, N, D]`` bfloat16, float8_e4m3fn or float32; Hq a multiple of
        Hkv.
      page_table: int32 ``[B, M]``, page of the tokens ``m * N`` to ``(m + 1) * N`` of a sequence.
      q_starts: int32 ``[B]``, first row of each sequence; no two sequences share a row.
      q_lens: int32 ``[B]``, rows of each sequence, 0 to max_q_len; 0 for an empty one.
      kv_lens: int32 ``[B]``, tokens in the cache including the chunk, at most M * N.
      max_q_len: bound of q_lens, static. Rows of a sequence beyond it are not computed (zeros).
      scale: of q . k; None for ``D ** -0.5``.
      window: keys that a query sees, itself included, or None for all.
      sinks: float32 ``[Hq]``, a logit per head that joins the denominator.
      logit_cap: soft cap of the scores, or None.
      q_scale: float32 ``[T, Hq]``, with fp8 q only.
      k_scale: of an fp8 cache, float32: per tensor ``[]`` or a number, per head ``[Hkv]``, or per
        token and head ``[P, Hkv, N]``. None for 1. Scales multiply.
      v_scale: of an fp8 cache, float32 ``[]``, a number, or ``[Hkv]``. None for 1.
      return_lse: also return the log-sum-exp.
      implementation: see :data:`jax_hpc.types.Implementation`.

    Returns:
      Output ``[T, Hq, D]`` in q's dtype (bfloat16 for fp8 q); with return_lse ``(output, lse)``,
      lse float32 ``[T, Hq]``, natural logarithm.

    Raises:
      ValueError: shapes or values do not fit.
      TypeError: a dtype is not supported, or a static argument is not a Python number.
      NotImplementedError: ``implementation="cuda"`` and no kernel takes the case.
    """
    dims = Dims(_NAME)
    dims.match("q", q, "T Hq D")
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
    for argument, value in (("q_starts", q_starts), ("q_lens", q_lens)):
        dims.match(argument, value, "B")
        check_dtype(_NAME, argument, value, (jnp.int32,))
    scales = normalize_scales(
        _NAME,
        dims,
        q=q,
        cache_dtype=k_pages.dtype,
        q_scale_axes="T Hq",
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    options = normalize_options(
        _NAME, head_dim=dims["D"], scale=scale, window=window, logit_cap=logit_cap
    )
    max_q_len = normalize_count(_NAME, "max_q_len", max_q_len)
    operands = Operands(q, k_pages, v_pages, page_table, q_starts, q_lens, kv_lens, sinks, *scales)
    params = Params(*options, max_q_len, bool(return_lse))
    results = OPERATOR(operands, params, implementation=implementation)
    return results.out if results.lse is None else (results.out, results.lse)
