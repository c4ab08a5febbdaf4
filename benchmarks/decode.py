"""Ops ``decode-bf16`` and ``decode-fp8``: decode_attention on the recorded mixes of lengths.

``cuda`` runs on a ready schedule, as every layer but the first does; ``own`` makes its own in each
call. ``static`` is the classic split by batch size, ``splits-8`` the batch-invariant cut of each
sequence into eight, ``xla`` XLA's form. Queries of an fp8 cache are fp8 with a scale per token and
head, scales of K and V are per tensor.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.paging import scattered_pages
from benchmarks.rows import Benchmark, Case, Row, floors
from benchmarks.timing import Workload
from jax_hpc import decode_attention, decode_schedule
from jax_hpc.ops.decode_attention import cases

HEADS = {heads.name: heads for heads in cases.BASELINE_HEADS}
MIXES = {mix.name: mix for mix in cases.BASELINE_MIXES}
PAGE_SIZE = 64
DTYPES = {"decode-bf16": jnp.bfloat16, "decode-fp8": jnp.float8_e4m3fn}
OPTIONS: dict[str, dict[str, Any]] = {
    "cuda": {"implementation": "cuda"},
    "own": {"implementation": "cuda"},
    "static": {"implementation": "cuda", "num_splits": "static"},
    "splits-8": {"implementation": "cuda", "num_splits": 8},
    "xla": {"implementation": "xla"},
}


def num_bytes(op: str, case: Case) -> int:
    """Keys and values, once."""
    heads, tokens = HEADS[case["heads"]], sum(MIXES[case["case"]].kv_lens)
    size = jnp.dtype(DTYPES[op]).itemsize
    return 2 * tokens * heads.num_kv_heads * heads.head_dim * size


def fields(op: str, case: Case, impl: str) -> Row:
    return {"impl": impl, **floors(num_bytes(op, case))}


def workload(op: str, case: Case, impl: str) -> Workload:
    make = _maker(op, case["heads"], case["case"])

    def call(operands: Any, state: Any) -> tuple[Any, Any]:
        arrays, schedule, scales = operands
        given = schedule if impl == "cuda" else None
        return decode_attention(*arrays, schedule=given, **scales, **OPTIONS[impl]), state

    return Workload(make, call, num_bytes(op, case))


@functools.cache
def _maker(op: str, heads_name: str, mix_name: str) -> Callable[..., Any]:
    heads, lens = HEADS[heads_name], np.asarray(MIXES[mix_name].kv_lens, np.int32)
    dtype = DTYPES[op]
    is_fp8 = dtype == jnp.float8_e4m3fn
    pages_of = -(-lens // PAGE_SIZE)
    places = np.arange(pages_of.max()) < pages_of[:, None]

    def make(key: jax.Array) -> tuple[Any, tuple[()]]:
        keys = jax.random.split(key, 4)
        num_pages = int(pages_of.sum())
        pool = (num_pages, heads.num_kv_heads, PAGE_SIZE, heads.head_dim)
        k, v = (jax.random.normal(key, pool, jnp.bfloat16).astype(dtype) for key in keys[:2])
        q_shape = (len(lens), 1, heads.num_q_heads, heads.head_dim)
        q = jax.random.normal(keys[2], q_shape, jnp.bfloat16).astype(dtype)
        ids = scattered_pages(num_pages)
        table = jnp.full(places.shape, -1, jnp.int32).at[places.nonzero()].set(ids)
        kv_lens = jnp.asarray(lens)
        schedule = decode_schedule(
            kv_lens,
            num_q_heads=heads.num_q_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            kv_dtype=dtype,
            page_size=PAGE_SIZE,
        )
        scales = {}
        if is_fp8:
            q_scale = jax.random.uniform(keys[3], q_shape[:3], jnp.float32, 0.5, 1.5)
            one = jnp.ones((), jnp.float32)
            scales = {"q_scale": q_scale, "k_scale": one, "v_scale": one}
        return ((q, k, v, table, kv_lens), schedule, scales), ()

    return make


def _benchmark(op: str) -> Benchmark:
    return Benchmark(
        op=op,
        operators=lambda _: ("decode_attention", "decode_schedule"),
        cases=[{"heads": heads, "case": mix} for heads in HEADS for mix in MIXES],
        impls=tuple(OPTIONS),
        default=("cuda", "static", "splits-8", "xla@*/64x512|*/1x16K+15x64"),
        fields=functools.partial(fields, op),
        workload=functools.partial(workload, op),
        rivals={"cuda": ("xla",)},
        recorded=frozenset({"cuda"}),
        # Building a schedule, once a step: no attention.
        no_rivals=frozenset({"hpcops:assign"}),
    )


BENCHMARKS = {op: _benchmark(op) for op in DTYPES}
