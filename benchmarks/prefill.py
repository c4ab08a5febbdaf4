"""Ops ``prefill-bf16`` and ``prefill-fp8``: prefill_attention on the recorded batches of chunks.

Queries of an fp8 cache are fp8 with a scale per token and head, scales of K and V are per tensor.
``xla`` is XLA's form; ``fa3`` is FlashAttention 3 on a cache of its own layout, bf16 only (package
flash-attn3-jax, whose wheel and einops' go beside ours: ``make gpu-bench PEERS=``). The floor is
arithmetic's: two products of every query with every key that it sees.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.paging import scattered_pages
from benchmarks.rows import Benchmark, Case, Row
from benchmarks.timing import Workload
from jax_hpc import prefill_attention
from jax_hpc.ops.prefill_attention import cases

CASES = {case.name: case for case in cases.CASES}
DTYPES = {"prefill-bf16": jnp.bfloat16, "prefill-fp8": jnp.float8_e4m3fn}
FLOOR_TFLOPS = {"prefill-bf16": 800, "prefill-fp8": 1600}
PRACTICAL_TFLOPS = {"prefill-bf16": 836, "prefill-fp8": 1672}
"""A product of two bf16 matrices of 8192 x 8192 on an H200 reaches 836."""


def num_flops(case: cases.Case) -> float:
    """As peers count them: a query of a causal chunk sees half of the chunk."""
    pairs = case.batch * case.q_len * (case.context + case.q_len / 2)
    return 4 * pairs * cases.NUM_Q_HEADS * cases.HEAD_DIM


def num_bytes(op: str, case: cases.Case) -> int:
    """Queries, keys, values and the output, once."""
    size = jnp.dtype(DTYPES[op]).itemsize
    queries = case.tokens * cases.NUM_Q_HEADS * cases.HEAD_DIM
    keys = case.batch * case.kv_len * cases.NUM_KV_HEADS * cases.HEAD_DIM
    return queries * (size + 2) + 2 * keys * size


def fields(op: str, case: Case, impl: str) -> Row:
    mega = num_flops(CASES[case["case"]]) / 1e6
    return {
        "impl": impl,
        "floor_us": round(mega / FLOOR_TFLOPS[op], 2),
        "practical_floor_us": round(mega / PRACTICAL_TFLOPS[op], 2),
    }


def workload(op: str, case: Case, impl: Any) -> Workload:
    shape = CASES[case["case"]]
    if impl == "fa3":
        return Workload(
            _fa3_maker(op, shape), functools.partial(_fa3, shape), num_bytes(op, shape)
        )

    def call(operands: Any, state: Any) -> tuple[Any, Any]:
        arrays, scales = operands
        options: dict[str, Any] = {"max_q_len": shape.q_len, "implementation": impl}
        return prefill_attention(*arrays, **scales, **options), state

    return Workload(_maker(op, shape), call, num_bytes(op, shape))


@functools.cache
def _maker(op: str, case: cases.Case) -> Callable[..., Any]:
    dtype = DTYPES[op]
    width = -(-case.kv_len // cases.PAGE_SIZE)
    pool = (case.batch * width, cases.NUM_KV_HEADS, cases.PAGE_SIZE, cases.HEAD_DIM)
    rows = (case.tokens, cases.NUM_Q_HEADS)

    def make(key: jax.Array) -> tuple[Any, tuple[()]]:
        keys = jax.random.split(key, 4)
        k, v = (jax.random.normal(key, pool, jnp.bfloat16).astype(dtype) for key in keys[:2])
        q = jax.random.normal(keys[2], (*rows, cases.HEAD_DIM), jnp.bfloat16).astype(dtype)
        ids = jnp.asarray(scattered_pages(pool[0]))
        starts = jnp.arange(case.batch, dtype=jnp.int32) * case.q_len
        lens = (jnp.full(case.batch, n, jnp.int32) for n in (case.q_len, case.kv_len))
        scales = {}
        if dtype == jnp.float8_e4m3fn:
            one = jnp.ones((), jnp.float32)
            q_scale = jax.random.uniform(keys[3], rows, jnp.float32, 0.5, 1.5)
            scales = {"q_scale": q_scale, "k_scale": one, "v_scale": one}
        return ((q, k, v, ids.reshape(case.batch, width), starts, *lens), scales), ()

    return make


def _fa3_maker(op: str, case: cases.Case) -> Callable[..., Any]:
    ours = _maker(op, case)

    def make(key: jax.Array) -> tuple[Any, tuple[()]]:
        ((q, *pages, table, _, _, kv_lens), _), state = ours(key)
        chunks = q.reshape(case.batch, case.q_len, *q.shape[1:])
        return (chunks, *(p.swapaxes(1, 2) for p in pages), table, kv_lens), state

    return make


def _fa3(case: cases.Case, operands: Any, state: Any) -> tuple[Any, Any]:
    q, k_pages, v_pages, table, kv_lens = operands
    attention = importlib.import_module("flash_attn3_jax").flash_mha_with_kvcache
    out = attention(q, k_pages, v_pages, cache_seqlens=kv_lens, page_table=table, is_causal=True)
    return out.reshape(case.tokens, *out.shape[2:]), state


def _benchmark(op: str) -> Benchmark:
    return Benchmark(
        op=op,
        operators=lambda impl: () if impl == "fa3" else ("prefill_attention",),
        cases=[{"case": name} for name in CASES],
        impls=("cuda", "xla", *(("fa3",) if op == "prefill-bf16" else ())),
        default=("cuda",),
        fields=functools.partial(fields, op),
        workload=functools.partial(workload, op),
        rivals={"cuda": ("xla", "fa3")},
        remeasured={"fa3": "jax:fa3-jax paged"},
        recorded=frozenset({"cuda"}),
        # On keys and values of one piece.
        no_rivals=frozenset({"jax:fa3-jax dense", "jax:cudnn dense"}),
    )


BENCHMARKS = {op: _benchmark(op) for op in DTYPES}
