"""Op ``router``: router_gemm on the routers of real models, and XLA's products beside it.

``auto`` and ``cuda`` are router_gemm (``:3`` for three terms, ``:1`` for one), ``router+topk`` is
router_gemm and route_topk as two calls. ``xla`` is the float32 product, ``bf16x3`` the same with
XLA's three-pass bf16 algorithm, both from the full float32 weight.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.rows import Benchmark, Case, Row, floors
from benchmarks.timing import Workload
from jax_hpc import route_topk, router_gemm, split_router_weight
from jax_hpc.ops.route_topk import cases as topk_cases
from jax_hpc.ops.router_gemm import cases

ROUTERS = {case.name: case for case in cases.CASES}
TOPK = {case.name: case for case in topk_cases.CASES}
TERMS = 2
FLOAT32 = ("xla", "bf16x3")


def parse(impl: str) -> tuple[str, int | None]:
    """Name and terms of an impl; float32 products have no terms."""
    name, _, terms = impl.partition(":")
    return name, None if name in FLOAT32 else int(terms or TERMS)


def num_bytes(case: Case, impl: str) -> int:
    """Activations, weight and logits, each moved once."""
    router = ROUTERS[case["shape"]]
    name, terms = parse(impl)
    weight = router.experts * router.hidden * (4 if terms is None else 2 * terms)
    total = 2 * case["m"] * router.hidden + weight + 4 * case["m"] * router.experts
    if name == "router+topk":
        total += case["m"] * (8 * TOPK[case["shape"]].k + 4)
    return total


def fields(case: Case, impl: str) -> Row:
    name, terms = parse(impl)
    return {"impl": name, "terms": terms, **floors(num_bytes(case, impl))}


def workload(case: Case, impl: str) -> Workload:
    router = ROUTERS[case["shape"]]
    name, terms = parse(impl)

    def make(key: jax.Array) -> tuple[Any, tuple[()]]:
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (case["m"], router.hidden), jnp.bfloat16)
        full = 0.02 * jax.random.normal(keys[1], (router.experts, router.hidden), jnp.float32)
        weight = (
            full if name == "bf16x3" else split_router_weight(full, terms or 1, keep_full=True)
        )
        bias = 0.01 * jax.random.normal(keys[2], (router.experts,), jnp.float32)
        return (x, weight, bias), ()

    call = functools.partial(CALLS[name], case["shape"])
    return Workload(make, lambda operands, state: (call(*operands), state), num_bytes(case, impl))


def _auto(shape: str, x: jax.Array, weight: Any, bias: jax.Array) -> jax.Array:
    del shape, bias
    return router_gemm(x, weight)


def _cuda(shape: str, x: jax.Array, weight: Any, bias: jax.Array) -> jax.Array:
    del shape, bias
    return router_gemm(x, weight, implementation="cuda")


def _xla(shape: str, x: jax.Array, weight: Any, bias: jax.Array) -> jax.Array:
    del shape, bias
    return router_gemm(x, weight, implementation="xla")


def _bf16x3(shape: str, x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    del shape, bias
    return jax.lax.dot_general(
        x.astype(jnp.float32),
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    )


def _router_topk(shape: str, x: jax.Array, weight: Any, bias: jax.Array) -> Any:
    topk = TOPK[shape]
    logits = router_gemm(x, weight)
    routed = route_topk(logits, topk.k, bias=bias if topk.has_bias else None, **topk.options)
    # The logits too: they are read again where a model returns them, and count as written.
    return logits, routed.ids, routed.weights


CALLS = {
    "auto": _auto,
    "cuda": _cuda,
    "xla": _xla,
    "bf16x3": _bf16x3,
    "router+topk": _router_topk,
}

BENCHMARK = Benchmark(
    op="router",
    operators=("router_gemm", "route_topk"),
    cases=[{"shape": case.name, "m": m} for case in cases.CASES for m in cases.TOKENS],
    impls=("auto", "auto:1", "auto:3", "cuda", "cuda:1", "cuda:3", *FLOAT32)
    + ("router+topk", "router+topk:1", "router+topk:3"),
    default_impls=("auto", "cuda", *FLOAT32),
    fields=fields,
    workload=workload,
    judged=frozenset({"auto", "cuda"}),
    remeasured={"xla": "jaxdistinct:xla-f32", "bf16x3": "jaxdistinct:xla-bf16x3"},
    # TF32 keeps 10 bits of the activations and of the weight.
    no_rivals=frozenset({"torch:cublas-tf32"}),
    subsets={"m >= 8": lambda case: case["m"] >= 8},
    option=("terms", TERMS),
)
