"""decode_attention as a JAX primitive."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hpc._primitive import Fold, Kernel, Operator
from jax_hpc.fp8 import E4M3
from jax_hpc.ops.decode_attention import heuristics, reference, xla
from jax_hpc.ops.decode_attention.schedule import heuristics as schedule_heuristics
from jax_hpc.ops.decode_attention.signature import Operands, Params, shape_rule

_HEAD_DIMS = (64, 128)
_PAGE_SIZES = (16, 32, 64, 128)
_MOST_ROWS = 128
_MOST_TILES = 2**31 - 1
"""Tiles of pages are coordinates of 32 bits."""
_MOST_PIECES = 2**30
"""As kMostPieces of cuda/decode_attention/launch.cu."""


def _unsupported(operands: Operands, params: Params) -> str | None:
    q, pages = operands.q, operands.k_pages
    batch, q_len, num_q_heads, _ = q.shape
    num_pages, num_kv_heads, page_size, head_dim = pages.shape
    dtypes = {"q": q.dtype, "the cache": pages.dtype}
    for name, dtype in dtypes.items():
        if dtype not in (jnp.bfloat16, E4M3):
            return f"{name} must be bfloat16 or float8_e4m3fn, got {dtype.name}"
    for name, value, allowed in (("D", head_dim, _HEAD_DIMS), ("N", page_size, _PAGE_SIZES)):
        if value not in allowed:
            return f"{name} must be one of {allowed}, got {value}"
    rows = num_q_heads // num_kv_heads * q_len
    if rows > _MOST_ROWS:
        return f"S * Hq / Hkv must be at most {_MOST_ROWS}, got {rows}"
    cut = _cut(operands, params)
    makes_schedule = operands.schedule is None and cut.splits == 0
    if makes_schedule and batch > schedule_heuristics.MAX_BATCH:
        return f"B must be at most {schedule_heuristics.MAX_BATCH}, got {batch}"
    if num_pages * num_kv_heads > _MOST_TILES:
        return f"P * Hkv must be at most {_MOST_TILES}"
    if batch * num_kv_heads * max(cut.splits, 1) > _MOST_PIECES:
        return f"B * Hkv and num_splits * B * Hkv must be at most {_MOST_PIECES}"
    return None


def _cut(operands: Operands, params: Params) -> heuristics.Cut:
    schedule = operands.schedule
    return heuristics.choose_cut(
        batch=operands.q.shape[0],
        num_splits=params.num_splits,
        scheduled_ctas=None if schedule is None else schedule.num_ctas,
    )


def _attributes(operands: Operands, params: Params) -> Mapping[str, Any]:
    cut = _cut(operands, params)
    options = {
        "scale": np.float32(params.scale),
        "window": np.int32(params.window or 0),
        "logit_cap": np.float32(params.logit_cap or 0),
        "num_splits": np.int32(cut.splits),
        "min_split_tiles": np.int32(cut.min_split_tiles),
        "return_lse": params.return_lse,
        "has_schedule": operands.schedule is not None,
        "has_sinks": operands.sinks is not None,
        "has_q_scale": operands.q_scale is not None,
        "has_k_scale": operands.k_scale is not None,
        "has_v_scale": operands.v_scale is not None,
        "pdl": True,
    }
    return {"options": options, "num_ctas": np.int32(cut.num_ctas)}


def _workspaces(operands: Operands, params: Params) -> Sequence[jax.ShapeDtypeStruct]:
    """Partial results of cut sequences, and the schedule where the launch makes one."""
    batch, q_len, num_q_heads, head_dim = operands.q.shape
    num_kv_heads = operands.k_pages.shape[1]
    cut = _cut(operands, params)
    slots = heuristics.workspace_slots(cut, batch=batch, num_kv_heads=num_kv_heads)
    rows = num_q_heads // num_kv_heads * q_len
    partials = [
        jax.ShapeDtypeStruct((slots, rows, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((slots, rows, 2), jnp.float32),
    ]
    if operands.schedule is not None or cut.splits > 0:
        return partials
    sizes = (cut.num_ctas + 1, cut.num_ctas + 1, cut.num_ctas)
    return [*partials, *(jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes)]


KERNEL = Kernel(
    target="jax_hpc.decode_attention.v1",
    unsupported=_unsupported,
    attributes=_attributes,
    workspaces=_workspaces,
)

OPERATOR = Operator(
    "decode_attention",
    shape_rule=shape_rule,
    reference=reference.decode_attention,
    xla=xla.decode_attention,
    kernel=KERNEL,
    fold=Fold(frozenset({"q", "page_table", "kv_lens", "q_scale"}), frozenset({"out", "lse"})),
    gradient="it serves decoding; train with an attention over the unpaged sequence, such as "
    "jax.nn.dot_product_attention",
)
