"""Op ``moe-fp8``: fused_moe on the experts of one rank, with weights that no cache holds.

``cuda`` is the kernels' chain, ``xla`` XLA's form. Weights have a scale per matrix, or, with
``:block``, one per block: of 128 rows, or of 64 where the shard is not made of whole blocks.
Tokens choose uniformly among the rank's experts, without replacement, as the recorded peers were
measured; ``cuda-zipf`` is the chain with choices by Zipf's law, of a most popular expert that is
another one in every layer. x is bf16: quantising it is part of the call.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rows import Benchmark, Case, Row, floors
from benchmarks.timing import Workload
from jax_hpc import Fp8BlockExperts, Fp8TensorExperts, fused_moe
from jax_hpc.fp8 import BLOCK, E4M3
from jax_hpc.ops.fused_moe import cases

SHAPES = {case.name: case for case in cases.CASES}
FORMAT = "per-tensor"
FORMATS = (FORMAT, "block")
NAMES = ("cuda", "cuda-zipf", "xla")
DRAWS = 16
"""Routings whose average number of experts stands for that of Zipf's law."""


def parse(impl: str) -> tuple[str, str]:
    """Name and format of an impl."""
    name, _, format = impl.partition(":")
    return name, format or FORMAT


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


def num_bytes(case: Case, impl: str) -> int:
    """The weights of the experts that the tokens chose, once."""
    shape = SHAPES[case["shape"]]
    active = active_experts(shape.name, case["bs"], parse(impl)[0] == "cuda-zipf")
    return round(active * 3 * shape.hidden * shape.inter)


def fields(case: Case, impl: str) -> Row:
    name, format = parse(impl)
    return {"impl": name, "format": format, **floors(num_bytes(case, impl))}


def workload(case: Case, impl: str) -> Workload:
    name, format = parse(impl)
    implementation: Any = name.partition("-")[0]

    def call(operands: Any, state: Any) -> tuple[Any, Any]:
        return fused_moe(*operands, implementation=implementation), state

    make = _maker(case["shape"], case["bs"], format, name == "cuda-zipf")
    return Workload(make, call, num_bytes(case, impl))


@functools.cache
def _maker(shape: str, tokens: int, format: str, is_zipf: bool) -> Callable[..., Any]:
    case = SHAPES[shape]

    def make(key: jax.Array) -> tuple[Any, tuple[()]]:
        keys = jax.random.split(key, 6)
        scores = jax.random.gumbel(keys[0], (tokens, case.experts))
        if is_zipf:
            popularity = jnp.asarray(np.log(_zipf(case.experts)), jnp.float32)
            scores = scores + jax.random.permutation(keys[1], popularity)
        ids = jax.lax.top_k(scores, case.k)[1].astype(jnp.int32)
        weights = jax.random.uniform(keys[2], ids.shape, jnp.float32, 0.05, 0.2)
        x = jax.random.normal(keys[3], (tokens, case.hidden), jnp.bfloat16)
        make_experts = _tensor_experts if format == FORMAT else _block_experts
        return (x, ids, weights, make_experts(case, keys[4], keys[5])), ()

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


BENCHMARK = Benchmark(
    op="moe-fp8",
    operators=lambda _: ("fused_moe",),
    cases=[{"shape": shape, "bs": bs} for shape in SHAPES for bs in cases.TOKENS],
    impls=tuple(f"{name}{option}" for option in ("", ":block") for name in NAMES),
    default=("cuda", "cuda:block", "cuda-zipf@*/16|*/64", "xla@*/1|*/64", "xla:block@*/1|*/64"),
    fields=fields,
    workload=workload,
    rivals={"cuda": ("xla",)},
    recorded=frozenset({"cuda"}),
    subsets={"bs <= 128": lambda case: case["bs"] <= 128},
    option=("format", FORMAT),
    peer_options={"hpcops:moe-pertensor": FORMAT, "hpcops:moe-blockwise": "block"},
)
BENCHMARKS = {BENCHMARK.op: BENCHMARK}
