"""What prefill_attention takes and gives: operands, static parameters, results, their shapes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_hpc.fp8 import E4M3


class Operands(NamedTuple):
    q: jax.Array  # [T, Hq, D]
    k_pages: jax.Array  # [P, Hkv, N, D]
    v_pages: jax.Array  # [P, Hkv, N, D]
    page_table: jax.Array  # [B, M]
    q_starts: jax.Array  # [B]
    q_lens: jax.Array  # [B]
    kv_lens: jax.Array  # [B]
    sinks: jax.Array | None  # [Hq]
    q_scale: jax.Array | None  # [T, Hq]
    k_scale: jax.Array | None  # [], [Hkv] or [P, Hkv, N]
    v_scale: jax.Array | None  # [] or [Hkv]


class Results(NamedTuple):
    out: Any  # [T, Hq, D]
    lse: Any  # [T, Hq] or None


@dataclasses.dataclass(frozen=True)
class Params:
    scale: float
    window: int | None
    logit_cap: float | None
    max_q_len: int
    return_lse: bool


def shape_rule(operands: Operands, params: Params) -> Results:
    q = operands.q
    dtype = jnp.bfloat16 if q.dtype == E4M3 else q.dtype
    lse = jax.ShapeDtypeStruct(q.shape[:2], jnp.float32) if params.return_lse else None
    return Results(jax.ShapeDtypeStruct(q.shape, dtype), lse)
