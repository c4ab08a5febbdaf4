"""fused_moe against float64 with the same quantisation points: every kind of experts and form."""

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_hpc import fp8
from jax_hpc.ops.fused_moe import (
    DenseExperts,
    Experts,
    Fp8TensorExperts,
    fused_moe,
    heuristics,
    quantize_experts_blockwise,
    quantize_experts_per_tensor,
    reference,
    xla,
)
from jax_hpc.ops.fused_moe.cases import CASES
from jax_hpc.ops.fused_moe.signature import Operands, Params
from tests.support import moe_truth
from tests.support.meshes import host_mesh
from tests.support.numerics import assert_bitwise, assert_close, cosine

T, E, K, OFFSET = 7, 5, 3, 2
change = dataclasses.replace


@dataclasses.dataclass(frozen=True)
class Kind:
    name: str
    hidden: int
    inter: int
    dtype: Any  # of x


KINDS = (
    Kind("float32", 40, 48, jnp.float32),
    Kind("bf16", 64, 48, jnp.bfloat16),
    Kind("fp8-tensor", 64, 48, jnp.bfloat16),
    Kind("fp8-block128", 160, 144, jnp.bfloat16),  # a last block that is not full, both ways
    Kind("fp8-block64", 128, 192, jnp.float32),
)
BY_NAME = {kind.name: kind for kind in KINDS}
FORMS = {
    "truth": reference.fused_moe,
    "xla": xla.fused_moe,
    "tiles": lambda operands, _: xla.run_sorted(
        operands, functools.partial(xla.by_tiles, count_tiles=False)
    ),
    "ragged": lambda operands, _: xla.run_sorted(operands, xla.by_ragged_dot),
}
KIND_AND_FORM = [
    (kind, form)
    for kind in KINDS
    for form in FORMS
    if form != "ragged" or not kind.name.startswith("fp8")
]


def dense_experts(rng: np.random.Generator, kind: Kind, experts: int = E) -> DenseExperts:
    shape = (experts, 2, kind.inter, kind.hidden)
    # Experts of different magnitude, so that a wrong expert or a wrong scale shows.
    size = rng.uniform(0.5, 2.0, (experts, 1, 1))
    gate_up = rng.standard_normal(shape) * kind.hidden**-0.5 * size[:, None]
    down = rng.standard_normal((experts, kind.hidden, kind.inter)) * kind.inter**-0.5 * size
    return DenseExperts(jnp.asarray(gate_up, kind.dtype), jnp.asarray(down, kind.dtype))


def make_experts(rng: np.random.Generator, kind: Kind) -> Experts:
    dense = dense_experts(rng, kind)
    if kind.name == "fp8-tensor":
        experts = quantize_experts_per_tensor(dense, input_scale=0.011, act_scale=0.02)
        scales = jnp.asarray(rng.uniform(0.01, 0.03, E), jnp.float32)
        return dataclasses.replace(experts, act_scale=scales)
    if kind.name.startswith("fp8-block"):
        return quantize_experts_blockwise(
            dense, block_rows=int(kind.name.removeprefix("fp8-block"))
        )
    return dense


def make_operands(rng: np.random.Generator, kind: Kind) -> Operands:
    shape = (T, kind.hidden)
    ids = rng.integers(OFFSET, OFFSET + E, (T, K)).astype(np.int32)
    ids[0] = [OFFSET, OFFSET, OFFSET + E - 1]  # the same expert twice
    ids[1] = [-1, OFFSET - 1, OFFSET + E]  # nobody's, the rank's before, the rank's after
    ids[2] = [np.iinfo(np.int32).min, OFFSET + 1, np.iinfo(np.int32).max]
    return Operands(
        x=jnp.asarray(rng.standard_normal(shape), kind.dtype),
        topk_ids=jnp.asarray(ids),
        topk_weights=jnp.asarray(rng.uniform(0.1, 1, (T, K)), jnp.float32),
        experts=make_experts(rng, kind),
        x_scale=None,
        expert_offset=jnp.int32(OFFSET),
        shared_output=jnp.asarray(rng.standard_normal(shape), kind.dtype),
        identity_weight=jnp.asarray(rng.uniform(-1, 1, T), jnp.float32),
    )


@functools.cache
def compiled(form: str) -> Any:
    return jax.jit(FORMS[form], static_argnums=1)


def run(form: str, operands: Operands) -> jax.Array:
    return compiled(form)(operands, Params()).out


def truth(operands: Operands) -> np.ndarray:
    return moe_truth.moe(
        operands.x,
        operands.topk_ids,
        operands.topk_weights,
        operands.experts,
        x_scale=operands.x_scale,
        offset=int(operands.expert_offset),
        shared=operands.shared_output,
        identity=operands.identity_weight,
    )


def assert_within_bounds(got: Any, want: np.ndarray, kind: Kind) -> None:
    largest = float(np.abs(want).max())
    if kind.name == "float32":
        assert_close(got, want, atol=2e-6 * largest)
        return
    assert cosine(got, want) >= (0.9999 if kind.name.startswith("fp8") else 0.99999)
    assert_close(got, want, atol=0.01 * largest)


@functools.cache
def sample(kind: Kind) -> tuple[Operands, Operands, np.ndarray, np.ndarray]:
    """Operands that all forms share, the same with all pairs on one expert, and both truths."""
    operands = make_operands(np.random.default_rng(zlib.crc32(kind.name.encode())), kind)
    one = operands._replace(topk_ids=jnp.full((T, K), 4, jnp.int32), expert_offset=jnp.int32(0))
    return operands, one, truth(operands), truth(one)


@pytest.mark.parametrize(("kind", "form"), KIND_AND_FORM, ids=lambda v: getattr(v, "name", v))
def test_against_float64(kind: Kind, form: str) -> None:
    operands, one, want, want_of_one = sample(kind)
    got = run(form, operands)
    assert got.dtype == kind.dtype
    assert_within_bounds(got, want, kind)

    # One expert has more than a tile, the others nothing; the traced offset changes.
    assert_within_bounds(run(form, one), want_of_one, kind)

    # A row of NaN and NaN weights of skipped choices leave every other row as it was.
    x, weights = np.array(operands.x), np.array(operands.topk_weights)
    x[4], weights[1], weights[2, 0] = np.nan, np.nan, np.inf
    dirty = operands._replace(x=jnp.asarray(x), topk_weights=jnp.asarray(weights))
    keep = np.arange(T) != 4
    assert_bitwise(np.asarray(run(form, dirty))[keep], np.asarray(got)[keep])

    # No expert of this rank is chosen: only what is added is left, exactly.
    none = operands._replace(expert_offset=jnp.int32(1000))
    x, shared, identity = (
        np.asarray(a).astype(np.float32)
        for a in (operands.x, operands.shared_output, operands.identity_weight)
    )
    added = shared + identity[:, None] * x
    assert_close(run(form, none), added.astype(kind.dtype), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 2, 13, 40, 200])
def test_every_tile_size(tokens: int, rng: np.random.Generator) -> None:
    kind = BY_NAME["float32"]
    operands = make_operands(rng, kind)._replace(
        x=jnp.asarray(rng.standard_normal((tokens, kind.hidden)), jnp.float32),
        topk_ids=jnp.asarray(rng.integers(-1, E + 1, (tokens, K)), jnp.int32),
        topk_weights=jnp.asarray(rng.uniform(0, 1, (tokens, K)), jnp.float32),
        expert_offset=jnp.int32(0),
        shared_output=None,
        identity_weight=None,
    )
    assert_within_bounds(run("xla", operands), truth(operands), kind)


def test_tile_sizes_grow_with_the_load() -> None:
    sizes = [heuristics.tile_rows(tokens * K, E) for tokens in (1, 2, 13, 40, 200)]
    assert sizes == [1, 4, 16, 64, 128]
    for case in CASES:
        for tokens in (1, 7, 64, 1024):
            pairs = tokens * case.k
            rows = heuristics.tile_rows(pairs, case.experts)
            bound = heuristics.max_tiles(pairs, case.experts, rows)
            # The routing that needs the most tiles: one pair for each expert, the rest to one.
            alone = min(case.experts, pairs) - 1
            assert alone + -(-(pairs - alone) // rows) <= bound <= pairs


def test_ragged_dot_serves_the_middle() -> None:
    assert not heuristics.prefers_ragged_dot(8, 192)
    assert heuristics.prefers_ragged_dot(8 * 64, 192)
    assert not heuristics.prefers_ragged_dot(8 * 2048, 192)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-block128"])
def test_x_that_is_fp8_already(name: str, rng: np.random.Generator) -> None:
    kind = BY_NAME[name]
    operands = make_operands(rng, kind)._replace(expert_offset=jnp.int32(0), identity_weight=None)
    x, ids, weights, experts = operands[:4]
    if name == "fp8-tensor":
        scale: Any = jnp.float32(0.011)  # the experts' input_scale
        quantized = fp8.quantize(x, scale)
    else:
        scale = fp8.amax_scale(jnp.pad(x, ((0, 0), (0, 96))).reshape(T, 2, 128), axis=2)
        quantized = fp8.quantize(x, jnp.repeat(scale, 128, axis=1)[:, : kind.hidden])
    call = jax.jit(functools.partial(fused_moe, shared_output=operands.shared_output))
    got = call(quantized, ids, weights, experts, x_scale=scale)
    assert got.dtype == jnp.bfloat16
    assert_bitwise(got, call(x, ids, weights, experts))

    identity = jnp.asarray(rng.uniform(-1, 1, T), jnp.float32)
    added = jax.jit(fused_moe)(
        quantized, ids, weights, experts, x_scale=scale, identity_weight=identity
    )
    want = moe_truth.moe(quantized, ids, weights, experts, x_scale=scale, identity=identity)
    assert_within_bounds(added, want, kind)


def test_a_scale_given_with_x_replaces_the_input_scale(rng: np.random.Generator) -> None:
    x, ids, weights, experts = make_operands(rng, BY_NAME["fp8-tensor"])[:4]
    quantized = fp8.quantize(x, jnp.float32(0.02))
    got = jax.jit(functools.partial(fused_moe, x_scale=0.02))(quantized, ids, weights, experts)
    want = moe_truth.moe(quantized, ids, weights, experts, x_scale=0.02)
    assert_within_bounds(got, want, BY_NAME["fp8-tensor"])


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-block128"])
def test_quantised_close_to_unquantised_activations(name: str, rng: np.random.Generator) -> None:
    kind = Kind(name, 256, 128, jnp.float32)
    operands = make_operands(rng, kind)._replace(shared_output=None, identity_weight=None)
    exact = operands._replace(experts=dequantized(operands.experts))
    if isinstance(operands.experts, Fp8TensorExperts):  # static scales, as if calibrated
        gate, up = np.einsum("th,ecih->ceti", operands.x, exact.experts.gate_up)
        largest = np.abs(moe_truth.silu(gate) * up).max(axis=(1, 2))
        scales = {
            "input_scale": jnp.float32(np.abs(operands.x).max() / 448),
            "act_scale": jnp.asarray(largest / 448, jnp.float32),
        }
        operands = operands._replace(experts=change(operands.experts, **scales))
    assert cosine(run("xla", operands), truth(exact)) >= 0.998


def dequantized(experts: Any) -> DenseExperts:
    if isinstance(experts, Fp8TensorExperts):
        halves = jnp.stack([experts.gate_scale, experts.up_scale], axis=1)
        return DenseExperts(
            fp8.dequantize(experts.gate_up, halves[:, :, None, None]),
            fp8.dequantize(experts.down, experts.down_scale[:, None, None]),
        )
    blocks = [
        [moe_truth.block_weight(experts, e, half) for half in (0, 1, None)] for e in range(E)
    ]
    return DenseExperts(
        jnp.asarray(np.stack([np.stack(b[:2]) for b in blocks]), jnp.float32),
        jnp.asarray(np.stack([b[2] for b in blocks]), jnp.float32),
    )


@pytest.mark.parametrize("name", ["float32", "fp8-block128"])
def test_no_tokens(name: str, rng: np.random.Generator) -> None:
    operands = make_operands(rng, BY_NAME[name])
    empty = jax.tree.map(lambda a: a[:0], operands._replace(experts=None, expert_offset=None))
    empty = empty._replace(experts=operands.experts, expert_offset=operands.expert_offset)
    for form in ("truth", "xla"):
        assert run(form, empty).shape == (0, BY_NAME[name].hidden)


def test_vmap_folds_into_tokens(rng: np.random.Generator) -> None:
    operands = make_operands(rng, BY_NAME["float32"])
    x, ids, weights, experts = operands[:4]
    call = functools.partial(fused_moe, experts=experts)
    flat = jax.jit(call)(*(a[:6] for a in (x, ids, weights)))
    folded = [a[:6].reshape(2, 3, *a.shape[1:]) for a in (x, ids, weights)]
    assert_bitwise(jax.jit(jax.vmap(call))(*folded).reshape(flat.shape), flat)
    # What is not mapped is repeated; weights of experts cannot be mapped.
    shared = jax.vmap(lambda w: call(x[:6], ids[:6], w))(weights[None, :6])
    assert_close(shared[0], flat, rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match="vmap over argument 'experts'"):
        jax.vmap(lambda d: fused_moe(x, ids, weights, DenseExperts(experts.gate_up, d)))(
            experts.down[None]
        )


def test_expert_parallel_ranks_sum_to_the_whole(rng: np.random.Generator) -> None:
    kind = BY_NAME["float32"]
    experts = dense_experts(rng, kind, experts=8)
    x = jnp.asarray(rng.standard_normal((T, kind.hidden)), jnp.float32)
    ids = jnp.asarray(rng.integers(-1, 8, (T, K)), jnp.int32)
    weights = jnp.asarray(rng.uniform(0, 1, (T, K)), jnp.float32)
    mesh = host_mesh(4, "ep")
    spec = PartitionSpec

    def rank(x, ids, weights, experts):
        offset = jax.lax.axis_index("ep") * 2
        return jax.lax.psum(fused_moe(x, ids, weights, experts, expert_offset=offset), "ep")

    sharded = jax.shard_map(
        rank, mesh=mesh, in_specs=(spec(), spec(), spec(), spec("ep")), out_specs=spec()
    )
    got = jax.jit(sharded)(x, ids, weights, experts)
    assert_within_bounds(got, moe_truth.moe(x, ids, weights, experts), kind)
