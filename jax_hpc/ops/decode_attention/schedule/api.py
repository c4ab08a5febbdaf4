"""Public function of decode_schedule."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_hpc._checks import Dims, check, check_dtype
from jax_hpc.ops._paged_checks import (
    MAX_Q_LEN,
    check_cache_dtype,
    check_heads,
    normalize_count,
    normalize_window,
)
from jax_hpc.ops.decode_attention.schedule import heuristics
from jax_hpc.ops.decode_attention.schedule.primitive import OPERATOR
from jax_hpc.ops.decode_attention.schedule.signature import DecodeSchedule, Operands, Params
from jax_hpc.types import Implementation


def decode_schedule(
    kv_lens: jax.Array,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: Any,
    page_size: int,
    q_len: int = 1,
    window: int | None = None,
    num_ctas: int | None = None,
    implementation: Implementation = "auto",
) -> DecodeSchedule:
    """Cut a decode step's attention over persistent CTAs, from lengths that live on the device.

    Build it once per step and per distinct window, after the lengths are known; every layer of
    that window uses it. The tiles of 64 KV tokens of all (sequence, KV head) pairs are laid end
    to end on an axis that counts tiles and tasks, and cut into near-equal contiguous spans, with
    a floor on work per CTA. So one long sequence among short ones keeps no CTA waiting. At most
    2 * num_ctas partial results arise.

    Args:
      kv_lens: int32 ``[B]``, tokens in the cache including the q_len new ones; 0 (or less) is an
        empty row of a padded batch. B up to 65,536, any length.
      num_q_heads, num_kv_heads, head_dim: Hq, Hkv, D of the attention call.
      kv_dtype: dtype of the cache: bfloat16, float8_e4m3fn or float32.
      page_size: N, tokens per page.
      q_len: S, query tokens per sequence, 1 to 8.
      window: keys that a query sees, itself included, or None for all.
      num_ctas: persistent CTAs; None for one an SM of the GPU (132 where there is none).
      implementation: see :data:`jax_hpc.types.Implementation`.

    Returns:
      :class:`DecodeSchedule`, which documents the layout.

    Raises:
      ValueError: a shape or value is out of range.
      TypeError: a dtype is not supported, or a static argument is not a Python int.
      NotImplementedError: ``implementation="cuda"`` and no kernel takes the case.
    """
    operator = "decode_schedule"
    dims = Dims(operator)
    dims.match("kv_lens", kv_lens, "B")
    check_dtype(operator, "kv_lens", kv_lens, (jnp.int32,))
    most = heuristics.MAX_BATCH
    check(dims["B"] <= most, operator, "kv_lens", expected=f"of B <= {most}", got=dims["B"])
    sizes = {
        "num_q_heads": normalize_count(operator, "num_q_heads", num_q_heads),
        "num_kv_heads": normalize_count(operator, "num_kv_heads", num_kv_heads),
        "head_dim": normalize_count(operator, "head_dim", head_dim),
        "kv_dtype": check_cache_dtype(operator, "kv_dtype", kv_dtype),
        "q_len": normalize_count(operator, "q_len", q_len, most=MAX_Q_LEN),
    }
    check_heads(operator, "num_q_heads", sizes["num_q_heads"], sizes["num_kv_heads"])
    page_size = normalize_count(operator, "page_size", page_size)
    window = normalize_window(operator, window)
    pairs, most = dims["B"] * sizes["num_kv_heads"], heuristics.MAX_PAIRS
    check(pairs <= most, operator, "num_kv_heads", expected=f"B * Hkv <= {most}", got=pairs)
    if num_ctas is None:
        num_ctas = heuristics.num_sms()
    num_ctas = normalize_count(operator, "num_ctas", num_ctas, most=heuristics.MAX_CTAS)
    fp8_cache = sizes["kv_dtype"] == "float8_e4m3fn"
    params = Params(sizes["num_kv_heads"], sizes["q_len"], window, num_ctas, fp8_cache)
    results = OPERATOR(Operands(kv_lens), params, implementation=implementation)
    return DecodeSchedule(*results, batch=dims["B"], page_size=page_size, window=window, **sizes)
