"""Op ``rms-norm``: rms_norm with a residual, as between the layers of a model.

``cuda`` is the kernel, ``xla`` XLA's form. The sum is carried through the loop, written in place
of the residual; in bf16 it stops growing when x is below half its last place. The weight is bf16.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.rows import Benchmark, Case, Row, floors
from benchmarks.timing import Workload
from jax_hpc import rms_norm
from jax_hpc.ops.rms_norm import cases


def num_bytes(case: Case) -> int:
    """x and the residual once, both results once, and the weight, in bf16."""
    return 2 * case["H"] * (4 * case["T"] + 1)


def fields(case: Case, impl: str) -> Row:
    return {"impl": impl, **floors(num_bytes(case))}


def workload(case: Case, impl: Any) -> Workload:
    def call(operands: Any, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = rms_norm(*operands, residual=residual, implementation=impl)
        return out.y, out.residual

    return Workload(_maker(case["H"], case["T"]), call, num_bytes(case))


@functools.cache
def _maker(hidden: int, tokens: int) -> Callable[..., Any]:
    def make(key: jax.Array) -> tuple[Any, jax.Array]:
        keys = jax.random.split(key, 3)
        x, residual = (jax.random.normal(k, (tokens, hidden), jnp.bfloat16) for k in keys[:2])
        return (x, jax.random.uniform(keys[2], (hidden,), jnp.bfloat16, 0.5, 1.5)), residual

    return make


BENCHMARK = Benchmark(
    op="rms-norm",
    operators=lambda _: ("rms_norm",),
    cases=[{"H": c.hidden, "T": tokens} for c in cases.CASES for tokens in cases.TOKENS],
    impls=("cuda", "xla"),
    default=("cuda", "xla"),
    fields=fields,
    workload=workload,
    rivals={"cuda": ("xla",)},
    recorded=frozenset({"cuda"}),
)
BENCHMARKS = {BENCHMARK.op: BENCHMARK}
