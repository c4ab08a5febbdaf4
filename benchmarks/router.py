"""Op ``router``: router_gemm and route_topk on the routers of real models, and XLA beside them.

``auto`` and ``cuda`` are router_gemm (``:3`` for three terms, ``:1`` for one) of a split weight of
which no full one is kept, as SplitRouter keeps none; ``auto-full`` has it. XLA's own forms are
``xla``, the float32 product, ``xla-parts``, router_gemm's XLA form without the full weight, and
``bf16x3``, XLA's three-pass bf16 algorithm on the float32 weight. ``router+topk`` is router_gemm
and route_topk as two calls, ``router-topk`` is router_topk, which is both in one, and ``topk`` is
route_topk alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.rows import Benchmark, Case, Row, floors
from benchmarks.timing import Workload
from jax_hpc import SplitWeight, route_topk, router_gemm, router_topk, split_router_weight
from jax_hpc.ops.route_topk import RouteResult
from jax_hpc.ops.route_topk import cases as topk_cases
from jax_hpc.ops.router_gemm import cases

ROUTERS = {case.name: case for case in cases.CASES}
TOPK = {case.name: case for case in topk_cases.CASES}
TERMS = 2
WITHOUT_TERMS = ("xla", "bf16x3", "topk")
KEEPS_FULL = ("auto-full", "xla")
CHOICES = ("router_gemm", "route_topk")
OPERATORS: dict[str, tuple[str, ...]] = {
    "xla": (),
    "bf16x3": (),
    "topk": ("route_topk",),
    "router+topk": CHOICES,
    "router-topk": (*CHOICES, "router_topk"),
}
"""Whose sources decide an impl's time, where it is not the product's alone; none for XLA's own."""


def parse(impl: str) -> tuple[str, int | None]:
    """Name and terms of an impl; what multiplies no split weight has no terms."""
    name, _, terms = impl.partition(":")
    return name, None if name in WITHOUT_TERMS else int(terms or TERMS)


def operators(impl: str) -> tuple[str, ...]:
    return OPERATORS.get(parse(impl)[0], ("router_gemm",))


def num_bytes(case: Case, impl: str) -> int:
    """What the whole of an impl reads and writes, once: what lies between its parts need not move.

    Activations and weight, then logits or the choice of experts; for topk, logits and the choice.
    """
    router, topk = ROUTERS[case["shape"]], TOPK[case["shape"]]
    name, terms = parse(impl)
    logits = 4 * case["m"] * router.experts
    choice = case["m"] * (8 * topk.k + 4 * _uses_identity(case["shape"]))
    if name == "topk":
        return logits + choice
    weight = router.experts * router.hidden * (4 if terms is None else 2 * terms)
    operands = 2 * case["m"] * router.hidden + weight
    return operands + (choice if "topk" in name else logits)


def fields(case: Case, impl: str) -> Row:
    name, terms = parse(impl)
    return {"impl": name, "terms": terms, **floors(num_bytes(case, impl))}


def workload(case: Case, impl: str) -> Workload:
    name, terms = parse(impl)
    if name == "topk":
        make = _logits_maker(case["shape"], case["m"])
    else:
        make = _maker(case["shape"], case["m"], terms, name in KEEPS_FULL or terms is None)
    call = functools.partial(CALLS[name], case["shape"])
    return Workload(make, lambda operands, state: (call(*operands), state), num_bytes(case, impl))


# Impls that take the same operands share a maker, and a process compiles it once.


@functools.cache
def _maker(shape: str, m: int, terms: int | None, keep_full: bool) -> Callable[..., Any]:
    router = ROUTERS[shape]

    def make(key: jax.Array) -> tuple[Any, tuple[()]]:
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (m, router.hidden), jnp.bfloat16)
        full = 0.02 * jax.random.normal(keys[1], (router.experts, router.hidden), jnp.float32)
        bias = 0.01 * jax.random.normal(keys[2], (router.experts,), jnp.float32)
        return (x, split_router_weight(full, terms or TERMS, keep_full=keep_full), bias), ()

    return make


@functools.cache
def _logits_maker(shape: str, m: int) -> Callable[..., Any]:
    def make(key: jax.Array) -> tuple[Any, tuple[()]]:
        keys = jax.random.split(key)
        experts = ROUTERS[shape].experts
        logits = jax.random.normal(keys[0], (m, experts), jnp.float32)
        return (logits, 0.01 * jax.random.normal(keys[1], (experts,), jnp.float32)), ()

    return make


def _product(implementation: Any, shape: str, x: jax.Array, weight: Any, bias: Any) -> jax.Array:
    del shape, bias
    return router_gemm(x, weight, implementation=implementation)


def _float32(shape: str, x: jax.Array, weight: SplitWeight, bias: jax.Array) -> jax.Array:
    del shape, bias
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum("th,eh->te", x.astype(jnp.float32), weight.full, precision=highest)


def _bf16x3(shape: str, x: jax.Array, weight: SplitWeight, bias: jax.Array) -> jax.Array:
    del shape, bias
    return jax.lax.dot_general(
        x.astype(jnp.float32),
        weight.full,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    )


def _uses_identity(shape: str) -> bool:
    """Whether a model of this router uses the zero experts' weight."""
    return "num_zero_experts" in TOPK[shape].options


def _chosen(shape: str, choose: Callable[..., RouteResult], bias: jax.Array) -> Any:
    """What a model takes of a choice of experts, by its options."""
    topk = TOPK[shape]
    routed = choose(topk.k, bias=bias if topk.has_bias else None, **topk.options)
    return routed if _uses_identity(shape) else (routed.ids, routed.weights)


def _topk(shape: str, logits: jax.Array, bias: jax.Array) -> Any:
    return _chosen(shape, functools.partial(route_topk, logits), bias)


def _two_calls(shape: str, x: jax.Array, weight: Any, bias: jax.Array) -> Any:
    return _topk(shape, router_gemm(x, weight), bias)


def _one_call(shape: str, x: jax.Array, weight: Any, bias: jax.Array) -> Any:
    return _chosen(shape, functools.partial(router_topk, x, weight), bias)


CALLS = {
    "auto": functools.partial(_product, "auto"),
    "auto-full": functools.partial(_product, "auto"),
    "cuda": functools.partial(_product, "cuda"),
    "xla": _float32,
    "xla-parts": functools.partial(_product, "xla"),
    "bf16x3": _bf16x3,
    "router+topk": _two_calls,
    "router-topk": _one_call,
    "topk": _topk,
}
OURS = ("auto", "auto-full", "cuda")
XLA_FORMS = ("xla", "xla-parts", "bf16x3")
ROUTINGS = ("router+topk", "router-topk", "topk")
OTHER_TERMS = [f"{impl}:{terms}" for impl in ("auto", "cuda", *ROUTINGS[:2]) for terms in (1, 3)]
FEW_AND_MANY = "@*/1|*/8|*/16|*/32|*/64|*/512|*/4096"

BENCHMARK = Benchmark(
    op="router",
    operators=operators,
    cases=[{"shape": case.name, "m": m} for case in cases.CASES for m in cases.TOKENS],
    impls=(*OURS, *XLA_FORMS, *ROUTINGS, *OTHER_TERMS),
    default=(
        *("auto", "auto-full@*/1", "cuda", "cuda:3@*/64|*/4096"),
        *("xla", "xla-parts@*/1", "bf16x3"),
        *(impl + FEW_AND_MANY for impl in ROUTINGS),
    ),
    fields=fields,
    workload=workload,
    # xla-parts is what "auto" itself may take.
    rivals={
        **dict.fromkeys(("auto", "auto-full"), ("xla", "bf16x3")),
        "cuda": XLA_FORMS,
        "router-topk": ("router+topk",),
    },
    recorded=frozenset(OURS),
    remeasured={"xla": "jaxdistinct:xla-f32", "bf16x3": "jaxdistinct:xla-bf16x3"},
    # TF32 keeps 10 bits of the activations and of the weight.
    no_rivals=frozenset({"torch:cublas-tf32"}),
    subsets={"m >= 8": lambda case: case["m"] >= 8},
    option=("terms", TERMS),
)
BENCHMARKS = {BENCHMARK.op: BENCHMARK}
