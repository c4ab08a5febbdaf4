"""Ops ``prologue-bf16`` and ``prologue-fp8``: qk_norm_rope_append on one rank's heads.

Up to 64 tokens are a decode step, each token in a page of its own; more are a prefill of one
sequence. Caches are carried through the loop and written in place. With fp8 the queries are
quantised too, and scales of K and V are per tensor. ``xla`` is XLA's form.

Every layer has a rotary table of its own, of a row for each token. Its 512 bytes a token no floor
counts: a tenth of what moves for heads 8/1 in bf16. In a model all layers share one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.paging import scattered_pages
from benchmarks.rows import Benchmark, Case, Row, floors
from benchmarks.timing import Workload
from jax_hpc import qk_norm_rope_append, rope_table
from jax_hpc.ops.qk_norm_rope_append import cases

CASES = {case.name: case for case in cases.CASES}
HEADS = {heads: CASES[name] for heads, name in cases.BASELINE_HEADS.items()}
PAGE_SIZE = 64
MOST_DECODED = 64
THETA = 1e6
DTYPES = {"prologue-bf16": jnp.bfloat16, "prologue-fp8": jnp.float8_e4m3fn}


def num_bytes(op: str, case: Case) -> int:
    """qkv once in bf16; queries, keys and values once as they are stored."""
    heads = HEADS[case["heads"]]
    values = case["T"] * (heads.q_heads + 2 * heads.kv_heads) * heads.head_dim
    return values * (2 + jnp.dtype(DTYPES[op]).itemsize)


def fields(op: str, case: Case, impl: str) -> Row:
    return {"impl": impl, **floors(num_bytes(op, case))}


def workload(op: str, case: Case, impl: Any) -> Workload:
    heads, is_fp8 = HEADS[case["heads"]], op == "prologue-fp8"

    def call(operands: Any, state: Any) -> tuple[Any, Any]:
        tokens, scales = operands
        options: dict[str, Any] = {**heads.options, **scales, "quantize_q": is_fp8}
        out = qk_norm_rope_append(*tokens, *state, **options, implementation=impl)
        return (out.q, out.q_scale) if is_fp8 else out.q, (out.k_pages, out.v_pages)

    return Workload(_maker(op, case["heads"], case["T"]), call, num_bytes(op, case))


@functools.cache
def _maker(op: str, heads_name: str, tokens: int) -> Callable[..., Any]:
    heads, dtype = HEADS[heads_name], DTYPES[op]
    is_decode = tokens <= MOST_DECODED
    num_pages = tokens if is_decode else -(-tokens // PAGE_SIZE)
    pool = (num_pages, heads.kv_heads, PAGE_SIZE, heads.head_dim)
    width = (heads.q_heads + 2 * heads.kv_heads) * heads.head_dim
    table = rope_table(tokens, heads.head_dim, THETA)

    def make(key: jax.Array) -> tuple[Any, Any]:
        keys = jax.random.split(key, 5)
        qkv = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
        weights = jax.random.uniform(keys[1], (2, heads.head_dim), jnp.bfloat16, 0.5, 1.5)
        pages = jnp.asarray(scattered_pages(num_pages))
        index = jnp.arange(tokens, dtype=jnp.int32)
        if is_decode:
            slots = pages * PAGE_SIZE + jax.random.randint(keys[2], (tokens,), 0, PAGE_SIZE)
        else:
            slots = pages[index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE
        caches = [jax.random.normal(k, pool, jnp.bfloat16).astype(dtype) for k in keys[3:]]
        one = jnp.ones((), jnp.float32)
        scales = {"k_scale": one, "v_scale": one} if dtype == jnp.float8_e4m3fn else {}
        operands = (qkv, weights[0], weights[1], jnp.asarray(table), index, slots)
        return (operands, scales), tuple(caches)

    return make


def _benchmark(op: str) -> Benchmark:
    return Benchmark(
        op=op,
        operators=lambda _: ("qk_norm_rope_append",),
        cases=[{"heads": heads, "T": tokens} for heads in HEADS for tokens in cases.TOKENS],
        impls=("cuda", "xla"),
        default=("cuda", "xla"),
        fields=functools.partial(fields, op),
        workload=functools.partial(workload, op),
        rivals={"cuda": ("xla",)},
        recorded=frozenset({"cuda"}),
        remeasured={"xla": "jaxloop:xla-prologue"},
    )


BENCHMARKS = {op: _benchmark(op) for op in DTYPES}
