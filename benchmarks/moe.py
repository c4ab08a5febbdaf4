"""Ops ``moe-fp8`` and ``moe-bf16``: fused_moe on one rank's experts, on cold weights.

``cuda`` is the kernels' chain, ``xla`` XLA's form. fp8 weights have a scale per matrix, or, with
``:block``, one per block: of 128 rows, or of 64 where the shard is not made of whole blocks.
Tokens choose uniformly among the rank's experts, without replacement, as the recorded peers were
measured; ``cuda-zipf`` is the chain with choices by Zipf's law, of a most popular expert that is
another one in every layer. x is bf16: quantising it is part of the call.

The floor is that of the weights' bytes, as the recorded peers have it; of bf16, the practical one
is arithmetic's where that takes longer.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rows import Benchmark, Case, Row, floors
from benchmarks.timing import Workload
from jax_hpc import DenseExperts, Fp8BlockExperts, Fp8TensorExperts, fused_moe
from jax_hpc.fp8 import BLOCK, E4M3
from jax_hpc.ops.fused_moe import Experts, cases

SHAPES = {case.name: case for case in cases.CASES}
FORMATS = {"moe-fp8": ("per-tensor", "block"), "moe-bf16": ("bf16",)}
"""Of each op, the one without an option first."""
VALUE_BYTES = {"moe-fp8": 1, "moe-bf16": 2}
PRACTICAL_TFLOPS = 650
"""Of grouped products in bf16."""
NAMES = ("cuda", "cuda-zipf", "xla")
DRAWS = 16
"""Routings whose average number of experts stands for that of Zipf's law."""


def parse(op: str, impl: str) -> tuple[str, str]:
    """Name and format of an impl."""
    name, _, format = impl.partition(":")
    return name, format or FORMATS[op][0]


@functools.cache
def active_experts(shape: str, tokens: int, is_zipf: bool) -> float:
    """Experts that a call meets, on average."""
    case = SHAPES[shape]
    if not is_zipf:
        return case.experts * (1 - (1 - case.k / case.experts) ** tokens)
    rng = np.random.default_rng(0)
    met = 0
    for _ in range(DRAWS):
        scores = np.log(_zipf(case.experts)) + rng.gumbel(size=(tokens, case.experts))
        met += len(np.unique(np.argpartition(scores, -case.k)[:, -case.k :]))
    return met / DRAWS


def _zipf(experts: int) -> np.ndarray:
    weights = 1 / np.arange(1, experts + 1)
    return weights / weights.sum()


def num_bytes(op: str, case: Case, impl: str) -> int:
    """The weights of the experts that the tokens chose, once."""
    shape = SHAPES[case["shape"]]
    active = active_experts(shape.name, case["bs"], parse(op, impl)[0] == "cuda-zipf")
    return round(active * 3 * shape.hidden * shape.inter * VALUE_BYTES[op])


def fields(op: str, case: Case, impl: str) -> Row:
    name, format = parse(op, impl)
    times = floors(num_bytes(op, case, impl))
    if op == "moe-fp8":
        return {"impl": name, "format": format, **times}
    shape = SHAPES[case["shape"]]
    mega = 6 * case["bs"] * shape.k * shape.hidden * shape.inter / 1e6
    by_products = round(mega / PRACTICAL_TFLOPS, 2)
    times["practical_floor_us"] = max(times["practical_floor_us"], by_products)
    return {"impl": name, **times}


def workload(op: str, case: Case, impl: str) -> Workload:
    name, format = parse(op, impl)
    implementation: Any = name.partition("-")[0]

    def call(operands: Any, state: Any) -> tuple[Any, Any]:
        return fused_moe(*operands, implementation=implementation), state

    make = _maker(case["shape"], case["bs"], name == "cuda-zipf")
    weights = _experts_maker(case["shape"], format)
    return Workload(make, call, num_bytes(op, case, impl), weights)


@functools.cache
def _experts_maker(shape: str, format: str) -> Callable[[jax.Array], Experts]:
    return lambda key: MAKERS[format](SHAPES[shape], *jax.random.split(key))


@functools.cache
def _maker(shape: str, tokens: int, is_zipf: bool) -> Callable[..., Any]:
    case = SHAPES[shape]

    def make(key: jax.Array) -> tuple[Any, tuple[()]]:
        keys = jax.random.split(key, 4)
        scores = jax.random.gumbel(keys[0], (tokens, case.experts))
        if is_zipf:
            popularity = jnp.asarray(np.log(_zipf(case.experts)), jnp.float32)
            scores = scores + jax.random.permutation(keys[1], popularity)
        ids = jax.lax.top_k(scores, case.k)[1].astype(jnp.int32)
        weights = jax.random.uniform(keys[2], ids.shape, jnp.float32, 0.05, 0.2)
        x = jax.random.normal(keys[3], (tokens, case.hidden), jnp.bfloat16)
        return (x, ids, weights), ()

    return make


def _random_fp8(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Of magnitudes from 1/16 to 1, never NaN."""
    bits = jax.random.bits(key, shape, jnp.uint8)
    bits = (bits & 0x87) | ((3 + ((bits >> 3) & 3)) << 3)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint8), E4M3)


def _matrices(case: cases.Case, *keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    gate_up = (case.experts, 2, case.inter, case.hidden)
    down = (case.experts, case.hidden, case.inter)
    return _random_fp8(keys[0], gate_up), _random_fp8(keys[1], down)


def _tensor_experts(case: cases.Case, *keys: jax.Array) -> Fp8TensorExperts:
    of_hidden, of_inter = 3 * case.hidden**-0.5, 3 * case.inter**-0.5
    return Fp8TensorExperts(
        *_matrices(case, *keys),
        gate_scale=jnp.full(case.experts, of_hidden, jnp.float32),
        up_scale=jnp.full(case.experts, of_hidden, jnp.float32),
        down_scale=jnp.full(case.experts, of_inter, jnp.float32),
        input_scale=jnp.full((), 0.0125, jnp.float32),
        act_scale=jnp.full(case.experts, 0.02, jnp.float32),
    )


def block_rows(case: cases.Case) -> int:
    return BLOCK if case.inter % BLOCK == 0 else BLOCK // 2


def _block_experts(case: cases.Case, *keys: jax.Array) -> Fp8BlockExperts:
    rows = block_rows(case)
    down, across = -(-case.inter // rows), -(-case.hidden // BLOCK)
    gate_up_shape, down_shape = (case.experts, 2, down, across), (case.experts, across, down)
    return Fp8BlockExperts(
        *_matrices(case, *keys),
        gate_up_scale=jnp.full(gate_up_shape, 3 * case.hidden**-0.5, jnp.float32),
        down_scale=jnp.full(down_shape, 3 * case.inter**-0.5, jnp.float32),
        block_rows=rows,
    )


def _random_bf16(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    """Uniform, of deviation ``scale``."""
    return jax.random.uniform(key, shape, jnp.bfloat16, -1, 1) * jnp.bfloat16(scale * 3**0.5)


def _dense_experts(case: cases.Case, *keys: jax.Array) -> DenseExperts:
    gate_up = (case.experts, 2, case.inter, case.hidden)
    down = (case.experts, case.hidden, case.inter)
    return DenseExperts(
        _random_bf16(keys[0], gate_up, case.hidden**-0.5),
        _random_bf16(keys[1], down, case.inter**-0.5),
    )


MAKERS: Mapping[str, Callable[..., Experts]] = {
    "per-tensor": _tensor_experts,
    "block": _block_experts,
    "bf16": _dense_experts,
}

_FP8 = Benchmark(
    op="moe-fp8",
    operators=lambda _: ("fused_moe",),
    cases=[{"shape": shape, "bs": bs} for shape in SHAPES for bs in cases.tokens_of(shape)],
    impls=tuple(f"{name}{option}" for option in ("", ":block") for name in NAMES),
    default=(
        "cuda",
        "cuda:block",
        "cuda-zipf@*/16|*/64|*/1024",
        "cuda-zipf:block@*/16|*/64|*/1024",
        "xla@*/1|*/64",
        "xla:block@*/1|*/64",
    ),
    fields=functools.partial(fields, "moe-fp8"),
    workload=functools.partial(workload, "moe-fp8"),
    rivals={"cuda": ("xla",)},
    recorded=frozenset({"cuda"}),
    subsets={"bs <= 128": lambda case: case["bs"] <= 128},
    option=("format", "per-tensor"),
    peer_options={"hpcops:moe-pertensor": "per-tensor", "hpcops:moe-blockwise": "block"},
)
_BF16 = Benchmark(
    op="moe-bf16",
    operators=lambda _: ("fused_moe",),
    cases=_FP8.cases,
    impls=NAMES,
    default=("cuda", "cuda-zipf@*/16|*/64|*/1024", "xla@*/1|*/64"),
    fields=functools.partial(fields, "moe-bf16"),
    workload=functools.partial(workload, "moe-bf16"),
    rivals={"cuda": ("xla",)},
    recorded=frozenset({"cuda"}),
    subsets={"bs <= 128": lambda case: case["bs"] <= 128},
)
BENCHMARKS = {benchmark.op: benchmark for benchmark in (_FP8, _BF16)}
