"""fused_moe's kernels on a GPU: float64, tile boundaries, routings, ranks, bits."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import fp8
from jax_hpc.ops.fused_moe import (
    DenseExperts,
    Experts,
    Fp8TensorExperts,
    fused_moe,
    quantize_experts_blockwise,
    quantize_experts_per_tensor,
)
from jax_hpc.ops.fused_moe.weights import quantize_groups
from tests.support import moe_truth
from tests.support.numerics import assert_bitwise, assert_close, cosine

pytestmark = pytest.mark.gpu

FP8_FORMATS = ("tensor", "block-128", "block-64")
FORMATS = (*FP8_FORMATS, "bf16")
INPUT_SCALE = 0.011
change = dataclasses.replace


@dataclasses.dataclass(frozen=True)
class Layer:
    format: str
    tokens: int
    top_k: int
    experts: int
    hidden: int
    inter: int


def make_experts(rng: np.random.Generator, layer: Layer) -> Experts:
    # Experts of different magnitude, so that a wrong expert or a wrong scale shows.
    size = rng.uniform(0.5, 2.0, (layer.experts, 1, 1))
    gate_up = rng.standard_normal((layer.experts, 2, layer.inter, layer.hidden), np.float32)
    down = rng.standard_normal((layer.experts, layer.hidden, layer.inter), np.float32)
    dense = DenseExperts(
        jnp.asarray(gate_up * layer.hidden**-0.5 * size[:, None], jnp.bfloat16),
        jnp.asarray(down * layer.inter**-0.5 * size, jnp.bfloat16),
    )
    if layer.format == "bf16":
        return dense
    if layer.format != "tensor":
        rows = int(layer.format.removeprefix("block-"))
        return quantize_experts_blockwise(dense, block_rows=rows)
    experts = quantize_experts_per_tensor(dense, input_scale=INPUT_SCALE, act_scale=0.02)
    scales = jnp.asarray(rng.uniform(0.01, 0.03, layer.experts), jnp.float32)
    return change(experts, act_scale=scales)


def draw(rng: np.random.Generator, layer: Layer, ids: Any = None) -> dict[str, Any]:
    """Operands of one call, by uniform routing unless ``ids`` are given."""
    pairs = (layer.tokens, layer.top_k)
    if ids is None:
        ids = rng.integers(0, layer.experts, pairs)
    x = rng.standard_normal((layer.tokens, layer.hidden))
    return {
        "x": jnp.asarray(x, jnp.bfloat16),
        "topk_ids": jnp.asarray(np.asarray(ids).reshape(pairs), jnp.int32),
        "topk_weights": jnp.asarray(rng.uniform(0.1, 1, pairs), jnp.float32),
        "experts": make_experts(rng, layer),
    }


def some_tokens(rng: np.random.Generator, layer: Layer, count: int) -> np.ndarray:
    """The first, the last and random ones."""
    return np.append(rng.integers(0, layer.tokens, count - 2), [0, layer.tokens - 1])


def addends(rng: np.random.Generator, layer: Layer) -> dict[str, Any]:
    shared = rng.standard_normal((layer.tokens, layer.hidden))
    return {
        "shared_output": jnp.asarray(shared, jnp.bfloat16),
        "identity_weight": jnp.asarray(rng.uniform(-1, 1, layer.tokens), jnp.float32),
    }


RUN, BY_XLA = (
    jax.jit(functools.partial(fused_moe, implementation=form), static_argnames="num_experts")
    for form in ("cuda", "xla")
)


def rows_of(args: dict[str, Any], tokens: np.ndarray) -> dict[str, Any]:
    """The same layer for some of its tokens."""
    by_token = ("x", "topk_ids", "topk_weights", "shared_output", "identity_weight")
    part = {name: value[tokens] for name, value in args.items() if name in by_token}
    if args.get("x_scale", np.zeros(())).ndim == 2:
        part["x_scale"] = args["x_scale"][tokens]
    return args | part


def check(args: dict[str, Any], tokens: np.ndarray | None = None) -> jax.Array:
    """The bounds of the operator's page, against float64 with the same rounding points.

    Beside them, for fp8, what a value near a tie of e4m3 may do (:mod:`tests.support.moe_truth`).
    tokens: those that are compared, instead of all.
    """
    result = got = RUN(**args)
    if tokens is not None:
        args, got = rows_of(args, tokens), got[tokens]
    want, slack = moe_truth.moe_and_slack(
        args["x"],
        args["topk_ids"],
        np.nan_to_num(np.asarray(args["topk_weights"])),
        args["experts"],
        x_scale=args.get("x_scale"),
        offset=int(args.get("expert_offset", 0)),
        shared=args.get("shared_output"),
        identity=args.get("identity_weight"),
    )
    if isinstance(args["experts"], DenseExperts):
        by_xla = np.asarray(BY_XLA(**args), np.float64)
        assert_close(got, want, atol=2 * np.abs(by_xla - want).max())
        assert cosine(got, want) >= 0.99999
        return result
    largest = np.abs(want).max()
    assert_close(got, want, atol=0.01 * largest + slack)
    assert cosine(got, want) >= 0.9999 - 0.5 * (np.square(slack).sum() / np.square(want).sum())
    return result


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("hidden", "inter"), [(16, 16), (144, 48), (512, 192), (384, 256), (256, 1536), (2048, 208)]
)
def test_sizes(rng: np.random.Generator, format: str, hidden: int, inter: int) -> None:
    """With everything: another rank's ids, duplicates, garbage, NaN weights of skipped choices."""
    layer = Layer(format, 9, 3, 5, hidden, inter)
    first = 7
    ids = rng.integers(first, first + 5, (9, 3))
    ids[0] = [first, first, first + 4]
    ids[1] = [-1, first - 1, first + 5]
    ids[2] = [np.iinfo(np.int32).min, first + 1, np.iinfo(np.int32).max]
    args = draw(rng, layer, ids) | addends(rng, layer) | {"expert_offset": jnp.int32(first)}
    skipped = (ids < first) | (ids >= first + 5)
    args["topk_weights"] = jnp.where(skipped, jnp.nan, args["topk_weights"])
    check(args)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_rows_of_an_expert(rng: np.random.Generator, format: str, rows: int) -> None:
    """So many for each expert: tiles just full, with one row less and with one more."""
    layer = Layer(format, 2 * rows, 2, 4, 128, 96)
    check(draw(rng, layer, np.arange(4 * rows) % 4))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mean", [2, 3, 4, 8, 9, 10, 20, 21, 22, 23, 49, 50])
def test_mean_rows_of_an_expert(rng: np.random.Generator, format: str, mean: int) -> None:
    """Uniform routing around the means at which the height of tiles changes."""
    check(draw(rng, Layer(format, 3 * mean, 2, 6, 128, 64)))


def zipf(rng: np.random.Generator, layer: Layer) -> np.ndarray:
    weights = 1.0 / np.arange(1, layer.experts + 1)
    shape = (layer.tokens, layer.top_k)
    return rng.choice(layer.experts, shape, p=weights / weights.sum())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_skewed_routing(rng: np.random.Generator, format: str, tokens: int) -> None:
    layer = Layer(format, tokens, 8, 24, 256, 192)
    check(draw(rng, layer, zipf(rng, layer)))
    check(draw(rng, layer, np.full((tokens, 8), 23)))  # all to one expert


@pytest.mark.parametrize("format", FORMATS)
def test_no_expert_gives_what_is_added(rng: np.random.Generator, format: str) -> None:
    layer = Layer(format, 6, 4, 3, 128, 64)
    args = draw(rng, layer, rng.choice([-1, 3, 1000], (6, 4)))
    assert_bitwise(RUN(**args), np.zeros((6, 128), jnp.bfloat16))
    shared = addends(rng, layer)["shared_output"]
    assert_bitwise(RUN(**args, shared_output=shared), shared)


@pytest.mark.parametrize("format", FORMATS)
def test_one_expert_and_one_choice(rng: np.random.Generator, format: str) -> None:
    check(draw(rng, Layer(format, 130, 1, 1, 128, 64)))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_of_nan_stays_alone(rng: np.random.Generator, format: str) -> None:
    args = draw(rng, Layer(format, 20, 4, 3, 256, 192))
    clean = np.asarray(RUN(**args))
    with_nan = np.asarray(RUN(**args | {"x": args["x"].at[5, ::3].set(jnp.nan)}))
    assert np.isnan(with_nan[5].astype(np.float32)).all()
    assert_bitwise(np.delete(with_nan, 5, axis=0), np.delete(clean, 5, axis=0))


def quantized_first(args: dict[str, Any]) -> dict[str, Any]:
    if isinstance(args["experts"], Fp8TensorExperts):
        scale = args["experts"].input_scale
        values = fp8.quantize(args["x"], scale)
    else:
        values, scale = quantize_groups(args["x"])
    return args | {"x": values, "x_scale": scale}


@pytest.mark.parametrize("format", FP8_FORMATS)
@pytest.mark.parametrize("tokens", [3, 50])
def test_quantising_first_gives_the_same_bits(
    rng: np.random.Generator, format: str, tokens: int
) -> None:
    layer = Layer(format, tokens, 4, 6, 272, 64)
    args = draw(rng, layer)
    given = quantized_first(args)
    assert_bitwise(RUN(**given), RUN(**args))
    check(given | addends(rng, layer))


@pytest.mark.parametrize("format", FORMATS)
def test_a_repeat_gives_the_same_bits(rng: np.random.Generator, format: str) -> None:
    for tokens in (1, 64, 1100, 2060):
        layer = Layer(format, tokens, 8, 32, 128, 64)
        args = draw(rng, layer) | addends(rng, layer)
        first = RUN(**args)
        for _ in range(3):
            assert_bitwise(RUN(**args), first)


@pytest.mark.parametrize("format", FORMATS)
def test_ranks_add_up_to_the_whole(rng: np.random.Generator, format: str) -> None:
    """One program serves all ranks: the offset is traced."""
    layer = Layer(format, 30, 4, 12, 128, 64)
    args = draw(rng, layer)
    whole = np.asarray(check(args), np.float32)
    experts, parts = args.pop("experts"), []
    traces = []

    @jax.jit
    def run(**given: Any) -> jax.Array:
        traces.append(given)
        return fused_moe(**given, num_experts=12, implementation="cuda")

    for first in (0, 4, 8):
        split = {
            field.name: getattr(experts, field.name)[first : first + 4]
            for field in dataclasses.fields(experts)
            if getattr(getattr(experts, field.name), "ndim", 0) > 0
        }
        mine = change(experts, **split)
        parts.append(
            np.asarray(run(**args, experts=mine, expert_offset=jnp.int32(first)), np.float32)
        )
    assert len(traces) == 1
    assert_close(sum(parts), whole, atol=0.02 * np.abs(whole).max())


def check_against_xla(args: dict[str, Any], part_of_largest: float, few: float = 0) -> None:
    """All results but a `few` within a part of the largest, and those within three times of it."""
    got, want = (np.asarray(run(**args), np.float32) for run in (RUN, BY_XLA))
    least = 0.99999 if isinstance(args["experts"], DenseExperts) else 0.9999
    assert not want.any() or cosine(got, want) >= least
    limit = part_of_largest * np.abs(want).max()
    assert np.mean(np.abs(got - want) > limit) <= few
    assert_close(got, want, atol=limit if few == 0 else 3 * limit)


# Few columns of the intermediate, so that one that rounds to the other side shows in the result.
SORTED = {
    "many experts": (300, 8, 512, 32, 16),
    "a cluster sorts": (1030, 8, 40, 64, 32),
    "128 CTAs sort": (2060, 8, 40, 64, 32),
    "161 CTAs sort": (16400, 40, 7, 32, 16),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sizes", ["real", *SORTED])
def test_against_xla(rng: np.random.Generator, format: str, sizes: str) -> None:
    """Where float64 on the host would take minutes."""
    layer = Layer(format, *SORTED.get(sizes, (64, 8, 64, 4096, 192)))
    check_against_xla(draw(rng, layer), 0.05 if sizes in SORTED else 0.01)


def wide_layer(format: str, mean: int) -> Layer:
    """Of so few columns that the wide products just have a task for each of 132 SMs.

    fp8 experts, per tensor or in blocks of 128 rows, take those from a mean of 22 rows an expert
    on, and tiles of 192 rows from 107 on. bf16 experts take them from 45 rows on, in tiles of 192
    rows from 108 on and of 256 from 167 on.
    """
    return Layer(format, 17 * mean, 2, 34, 144, 256)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mean", [21, 22, 44, 45, 106, 107, 108, 166, 167])
def test_means_around_the_wide_products(rng: np.random.Generator, format: str, mean: int) -> None:
    check_against_xla(draw(rng, wide_layer(format, mean)), 0.02)


@pytest.mark.parametrize("format", ["tensor", "block-128", "bf16"])
@pytest.mark.parametrize("mean", [22, 46, 110, 130, 200])
def test_wide_products_against_float64(rng: np.random.Generator, format: str, mean: int) -> None:
    """The bounds that the comparison with XLA's form cannot have: of both a value of the
    intermediate may round to another side, and float64 says which are that near to a tie."""
    layer = wide_layer(format, mean)
    args = draw(rng, layer) | addends(rng, layer)
    check(args, some_tokens(rng, layer, 150))


@pytest.mark.parametrize("format", ["tensor", "block-128", "bf16"])
@pytest.mark.parametrize("mean", [46, 130, 200])
def test_wide_products(rng: np.random.Generator, format: str, mean: int) -> None:
    """Routings, a rank's part of the experts, x that is fp8 already; the same bits again.

    Said to be half of all experts, they take lower tiles, and those of a mean of 46 none of these.
    """
    layer = wide_layer(format, mean)
    args = draw(rng, layer)
    first = RUN(**args)
    assert_bitwise(RUN(**args), first)
    if format != "bf16":
        assert_bitwise(RUN(**quantized_first(args)), first)
    pairs = (layer.tokens, layer.top_k)
    # One value of the intermediate, of 256, that lies at the middle of two of e4m3 can be 3 % of
    # the largest result: here 336 -> 320 or 352, 8e-5 of it from the middle, moves one by 0.031.
    few = 1e-4
    for ids in (zipf(rng, layer), np.full(pairs, 33), np.full(pairs, 34)):
        check_against_xla(args | {"topk_ids": jnp.asarray(ids, jnp.int32)}, 0.02, few)
    ranks_ids = jnp.asarray(rng.integers(-1, 50, pairs), jnp.int32)
    more = {"topk_ids": ranks_ids, "expert_offset": jnp.int32(9)} | addends(rng, layer)
    check_against_xla(args | more, 0.02, few)
    check_against_xla(args | more | {"num_experts": 2 * layer.experts}, 0.02, few)


@pytest.mark.parametrize("format", FORMATS)
def test_real_width(rng: np.random.Generator, format: str) -> None:
    """Of Qwen3-30B, with 46 rows an expert; of fp8 also against activations that are not."""
    layer = Layer(format, 92, 8, 16, 2048, 768)
    args = draw(rng, layer)
    if format == "tensor":  # so wide that hardly a value of the intermediate saturates
        args["experts"] = change(args["experts"], act_scale=jnp.float32(0.1))
    tokens = some_tokens(rng, layer, 6)
    got = check(args, tokens)
    if format == "bf16":
        return
    matrices_of = functools.cache(lambda e: moe_truth.matrices(args["experts"], e))
    want = np.zeros((len(tokens), layer.hidden))
    for row, token in zip(want, tokens, strict=True):
        x = np.asarray(args["x"][token], np.float64)
        ids, weights = (np.asarray(args[f"topk_{name}"][token]) for name in ("ids", "weights"))
        for expert, weight in zip(ids, weights, strict=True):
            gate, up, down = matrices_of(int(expert))
            row += weight * (down @ (moe_truth.silu(gate @ x) * (up @ x)))
    assert cosine(got[tokens], want) >= 0.998


MANY_TOKENS = {
    "tensor": Layer("tensor", 65536, 8, 8, 4112, 64),
    "bf16": Layer("bf16", 16384, 8, 8, 4112, 64),
    "wide tensor": Layer("tensor", 65536, 8, 34, 4112, 256),
    "wide block": Layer("block-128", 65536, 8, 34, 4112, 256),
    "wide bf16": Layer("bf16", 16384, 8, 34, 4112, 256),
}


@pytest.mark.parametrize("name", MANY_TOKENS)
def test_many_tokens(rng: np.random.Generator, name: str) -> None:
    """Outputs of more than 2^31 values in fp8, of more than 2^31 bytes in bf16."""
    layer = MANY_TOKENS[name]
    args = draw(rng, change(layer, tokens=1))
    shape = (layer.tokens, layer.hidden)
    args["x"] = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    ids = rng.integers(0, layer.experts, (layer.tokens, layer.top_k))
    ids[-1, -1] = layer.experts - 1  # the very last row
    args["topk_ids"] = jnp.asarray(ids, jnp.int32)
    args["topk_weights"] = jnp.asarray(rng.uniform(0.1, 1, ids.shape), jnp.float32)
    got = check(args, some_tokens(rng, layer, 16 if "wide" in name else 64))
    assert bool((RUN(**args).view(jnp.uint16) == got.view(jnp.uint16)).all())
