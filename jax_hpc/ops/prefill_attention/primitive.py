"""prefill_attention as a JAX primitive."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hpc._primitive import Kernel, Operator
from jax_hpc.fp8 import E4M3
from jax_hpc.ops.prefill_attention import heuristics, reference, xla
from jax_hpc.ops.prefill_attention.signature import Operands, Params, shape_rule

_HEAD_DIMS = (64, 128)
_PAGE_SIZES = (16, 32, 64, 128)
_MOST_GROUP = 128
_MOST = 2**31 - 1
"""The kernel counts rows, tasks and tiles of pages in 32-bit integers."""


def _unsupported(operands: Operands, params: Params) -> str | None:
    q, pages = operands.q, operands.k_pages
    tokens, num_q_heads, _ = q.shape
    num_pages, num_kv_heads, page_size, head_dim = pages.shape
    for name, dtype in (("q", q.dtype), ("the cache", pages.dtype)):
        if dtype not in (jnp.bfloat16, E4M3):
            return f"{name} must be bfloat16 or float8_e4m3fn, got {dtype.name}"
    for name, value, allowed in (("D", head_dim, _HEAD_DIMS), ("N", page_size, _PAGE_SIZES)):
        if value not in allowed:
            return f"{name} must be one of {allowed}, got {value}"
    group = num_q_heads // num_kv_heads
    if group > _MOST_GROUP:
        return f"Hq / Hkv must be at most {_MOST_GROUP}, got {group}"
    if not params.scale > 0:
        return f"scale must be above 0, got {params.scale}"
    if max(_plan_ints(operands), tokens * group, num_pages * num_kv_heads) > _MOST:
        return f"T * Hq / Hkv, P * Hkv and the plan's size must be at most {_MOST}"
    return None


def _plan_ints(operands: Operands) -> int:
    batch, num_kv_heads = operands.page_table.shape[0], operands.k_pages.shape[1]
    tokens, num_q_heads, _ = operands.q.shape
    return heuristics.plan_ints(tokens=tokens, batch=batch, group=num_q_heads // num_kv_heads)


def _attributes(operands: Operands, params: Params) -> Mapping[str, Any]:
    options = {
        "scale": np.float32(params.scale),
        "window": np.int32(min(params.window or 0, _MOST)),
        "logit_cap": np.float32(params.logit_cap or 0),
        "max_q_len": np.int32(min(params.max_q_len, _MOST)),
        "return_lse": params.return_lse,
        "has_sinks": operands.sinks is not None,
        "has_q_scale": operands.q_scale is not None,
        "has_k_scale": operands.k_scale is not None,
        "has_v_scale": operands.v_scale is not None,
        "pdl": True,
    }
    return {"options": options}


def _workspaces(operands: Operands, params: Params) -> Sequence[jax.ShapeDtypeStruct]:
    """The plan: which tiles of rows there are, in the order in which they are worked on."""
    del params
    return [jax.ShapeDtypeStruct((_plan_ints(operands),), jnp.int32)]


KERNEL = Kernel(
    target="jax_hpc.prefill_attention.v1",
    unsupported=_unsupported,
    attributes=_attributes,
    workspaces=_workspaces,
)

OPERATOR = Operator(
    "prefill_attention",
    shape_rule=shape_rule,
    reference=reference.prefill_attention,
    xla=xla.prefill_attention,
    kernel=KERNEL,
    gradient="it serves inference; train with an attention over the unpaged sequence, such as "
    "jax.nn.dot_product_attention",
)
