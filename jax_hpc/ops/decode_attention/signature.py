"""What decode_attention takes and gives: operands, static parameters, results and their shapes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_hpc.fp8 import E4M3
from jax_hpc.ops.decode_attention.schedule import DecodeSchedule


class Operands(NamedTuple):
    q: jax.Array  # [B, S, Hq, D]
    k_pages: jax.Array  # [P, Hkv, N, D]
    v_pages: jax.Array  # [P, Hkv, N, D]
    page_table: jax.Array  # [B, M]
    kv_lens: jax.Array  # [B]
    schedule: DecodeSchedule | None
    sinks: jax.Array | None  # [Hq]
    q_scale: jax.Array | None  # [B, S, Hq]
    k_scale: jax.Array | None  # [], [Hkv] or [P, Hkv, N]
    v_scale: jax.Array | None  # [] or [Hkv]


class Results(NamedTuple):
    out: Any  # [B, S, Hq, D]
    lse: Any  # [B, S, Hq] or None


@dataclasses.dataclass(frozen=True)
class Params:
    """num_splits says how a kernel cuts the keys; the jax.numpy forms do not look at it."""

    scale: float
    window: int | None
    logit_cap: float | None
    num_splits: int | str | None
    return_lse: bool


def shape_rule(operands: Operands, params: Params) -> Results:
    q, schedule = operands.q, operands.schedule
    if schedule is not None and schedule.batch != q.shape[0]:
        # api.py has compared them; only vmap's folding changes B after that.
        raise NotImplementedError(
            "decode_attention: vmap folds the mapped axis into B, which a ready schedule does not "
            f"cover (built for B = {schedule.batch}, folded B = {q.shape[0]}); pass schedule=None "
            "inside vmap"
        )
    dtype = jnp.bfloat16 if q.dtype == E4M3 else q.dtype
    lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32) if params.return_lse else None
    return Results(jax.ShapeDtypeStruct(q.shape, dtype), lse)
