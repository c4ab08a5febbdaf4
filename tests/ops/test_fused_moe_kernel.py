"""What fused_moe's kernels are given: the call lowered for a GPU, and what it refuses."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_hpc import _primitive, _registry
from jax_hpc.fp8 import E4M3
from jax_hpc.ops.fused_moe import (
    DenseExperts,
    Fp8BlockExperts,
    Fp8TensorExperts,
    fused_moe,
    heuristics,
    primitive,
)
from jax_hpc.types import FallbackWarning

T, K, E, H, INTER = 5, 3, 6, 144, 208
PAIRS = T * K
F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32


def shape(*sizes: int, dtype: Any = F32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def tensor_experts(experts: int = E, hidden: int = H) -> Fp8TensorExperts:
    return Fp8TensorExperts(
        shape(experts, 2, INTER, hidden, dtype=E4M3),
        shape(experts, hidden, INTER, dtype=E4M3),
        *(shape(experts) for _ in range(3)),
        input_scale=shape(),
        act_scale=shape(),
    )


def block_experts(block_rows: int) -> Fp8BlockExperts:
    rows, columns = -(-INTER // block_rows), 2
    return Fp8BlockExperts(
        shape(E, 2, INTER, H, dtype=E4M3),
        shape(E, H, INTER, dtype=E4M3),
        shape(E, 2, rows, columns),
        shape(E, columns, rows),
        block_rows,
    )


def dense_experts(dtype: Any) -> DenseExperts:
    return DenseExperts(
        shape(E, 2, INTER, H, dtype=dtype),
        shape(E, H, INTER, dtype=dtype),
    )


DENSE = dense_experts(BF16)


def arguments(tokens: int = T, top_k: int = K, hidden: int = H, **changes: Any) -> dict[str, Any]:
    return {
        "x": shape(tokens, hidden, dtype=BF16),
        "topk_ids": shape(tokens, top_k, dtype=I32),
        "topk_weights": shape(tokens, top_k),
        "experts": tensor_experts(hidden=hidden),
        **changes,
    }


def lower(args: dict[str, Any], implementation: Any = "cuda", **static: Any) -> str:
    """The custom calls of a program for a GPU, lowered on any machine."""
    call = functools.partial(fused_moe, implementation=implementation, **static)
    text = jax.jit(call).trace(**args).lower(lowering_platforms=("cuda",)).as_text()
    return "\n".join(line for line in text.splitlines() if "custom_call @jax_hpc" in line)


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "unusable_reason", lambda: None)


def attributes(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+) = (true|false|-?\d+)(?: : \w+)?", text))


def operand_types(text: str) -> list[str]:
    return re.findall(r"tensor<(\w+)>", text.split(" : (")[-1].split("->")[0])


def result_types(text: str) -> list[str]:
    return re.findall(r"tensor<(\w+)>", text.split("->")[-1])


@pytest.mark.parametrize(
    "experts", [DENSE, tensor_experts(), block_experts(128), block_experts(64)]
)
def test_experts_take_the_kernels(experts: Any) -> None:
    args = arguments(experts=experts)
    for implementation, is_kernel in (("auto", True), ("cuda", True), ("xla", False)):
        assert ("fused_moe.v1" in lower(args, implementation)) == is_kernel


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"experts": dense_experts(F32), "x": shape(T, H)},
            "x and DenseExperts must be bfloat16, got float32",
        ),
        ({"x": shape(T, H)}, "x must be bfloat16 or float8_e4m3fn, got float32"),
    ],
    ids=["dense", "fp8"],
)
def test_auto_says_once_that_there_is_no_kernel(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(_primitive, "_WARNED", set())
    with pytest.warns(FallbackWarning, match=words) as warned:
        for _ in range(2):
            jax.clear_caches()  # or JAX gives the program that it has
            assert lower(arguments(**changes), "auto") == ""
    assert len(warned) == 1


def test_per_tensor_call() -> None:
    text = lower(arguments())
    assert text.count("@jax_hpc.fused_moe.v1") == 1
    given = attributes(text)
    assert (given["block_rows"], given["pdl"]) == ("0", "true")
    assert given["chosen_among"] == "0"
    assert attributes(lower(arguments(), num_experts=48))["chosen_among"] == "48"
    flags = ("x_scale", "shared_output", "identity_weight")
    assert all(given[f"has_{flag}"] == "false" for flag in flags)
    assert operand_types(text) == [
        *("5x144xbf16", "5x3xi32", "5x3xf32", "6x2x208x144xf8E4M3FN", "6x144x208xf8E4M3FN"),
        *("i32", "6xf32", "6xf32", "6xf32", "f32", "f32"),
    ]
    # The output; header, tiles, row_token, pair_row, counts of five segments; x, intermediate and
    # outputs of experts.
    assert result_types(text) == [
        *("5x144xbf16", "4xi32", "28xi32", "15xi32", "15xi32", "15xui32"),
        *("5x144xf8E4M3FN", "15x208xf8E4M3FN", "15x144xbf16"),
    ]


def test_bf16_call() -> None:
    """No scales, nothing that is quantised; an intermediate in bf16, and outputs in float32."""
    args = arguments(experts=DENSE, shared_output=shape(T, H, dtype=BF16))
    text = lower(args)
    assert text.count("@jax_hpc.fused_moe.v1") == 1
    given = attributes(text)
    assert (given["block_rows"], given["pdl"]) == ("0", "true")
    assert (given["has_x_scale"], given["has_shared_output"]) == ("false", "true")
    assert operand_types(text) == [
        *("5x144xbf16", "5x3xi32", "5x3xf32", "6x2x208x144xbf16", "6x144x208xbf16"),
        *("i32", "5x144xbf16"),
    ]
    assert result_types(text) == [
        *("5x144xbf16", "4xi32", "28xi32", "15xi32", "15xi32", "15xui32"),
        *("15x208xbf16", "15x288xbf16"),
    ]


@pytest.mark.parametrize("block_rows", [128, 64])
def test_block_call_with_everything(block_rows: int) -> None:
    args = arguments(
        x=shape(T, H, dtype=E4M3),
        experts=block_experts(block_rows),
        x_scale=shape(T, 2),
        expert_offset=shape(dtype=I32),
        shared_output=shape(T, H, dtype=BF16),
        identity_weight=shape(T),
    )
    text = lower(args)
    given = attributes(text)
    assert given["block_rows"] == str(block_rows)
    flags = ("x_scale", "shared_output", "identity_weight")
    assert all(given[f"has_{flag}"] == "true" for flag in flags)
    rows = -(-INTER // block_rows)
    assert operand_types(text)[6:] == [
        *(f"6x2x{rows}x2xf32", f"6x2x{rows}xf32", "5x2xf32", "5x144xbf16", "5xf32"),
    ]
    # x is fp8 already: no place for it, nor for its scales. The outputs' place first holds 208
    # float32 of each row; two counts for each of seven tiles.
    assert result_types(text)[6:] == ["15x208xf8E4M3FN", "15x2xf32", "15x416xbf16", "14xui32"]


def test_block_call_quantises_x() -> None:
    results = result_types(lower(arguments(experts=block_experts(128))))
    assert results[6:9] == ["5x144xf8E4M3FN", "5x2xf32", "15x208xf8E4M3FN"]


@pytest.mark.parametrize(
    ("tokens", "top_k", "segments"),
    [
        (1, 8, 1),
        (128, 8, 128),
        (129, 8, 65),
        (2**19 + 1, 1, 129),
        (65536, 8, 128),
        (40000, 128, 1250),
    ],
)
def test_each_segment_leaves_counts(tokens: int, top_k: int, segments: int) -> None:
    """Up to 128 segments, more where one would have more than 4096 pairs; three words of each."""
    results = result_types(lower(arguments(tokens=tokens, top_k=top_k)))
    assert results[5] == f"{3 * segments}xui32"


def test_sizes_are_those_of_the_kernels() -> None:
    """The handler refuses workspaces of other sizes; here, that the constants are the same."""
    header = Path(__file__).parents[2] / "cuda/fused_moe/launch.h"
    constants = dict(re.findall(r"constexpr int (k\w+) = (\d+);", header.read_text()))
    assert int(constants["kSegments"]) == heuristics._SEGMENTS
    assert int(constants["kPairsOfSegment"]) == heuristics._PAIRS_OF_SEGMENT


def test_limits_are_those_of_the_kernels() -> None:
    """The handler refuses more; here, that such a call never reaches it."""
    header = (Path(__file__).parents[2] / "cuda/fused_moe/launch.h").read_text()
    constants = dict(re.findall(r"constexpr int (k\w+) = (\d+);", header))
    powers = dict(re.findall(r"constexpr int64_t (k\w+) = int64_t\{1\} << (\d+);", header))
    assert int(constants["kMostExperts"]) == primitive._MOST_EXPERTS
    assert int(constants["kMostTopK"]) == primitive._MOST_TOP_K
    assert int(constants["kAligned"]) == primitive._ALIGNED
    assert 2 ** int(powers["kMostPairs"]) == primitive._MOST_PAIRS
    assert 2 ** int(powers["kMostGroups"]) == primitive._MOST_GROUPS


@pytest.mark.parametrize("hidden", [16, 112, 128, 144, 4096])
def test_outputs_have_room_for_sorted_rows(hidden: int) -> None:
    """The wide products read x where outputs will lie: in bf16, or in e4m3 with its scales."""
    assert heuristics.outputs_width(hidden, 16, is_block=False, is_bf16=True) >= hidden
    for is_block in (False, True):
        width = heuristics.outputs_width(hidden, 16, is_block=is_block, is_bf16=False)
        assert hidden + 4 * -(-hidden // 128) <= 2 * width


def test_more_tiles_than_any_routing_needs() -> None:
    for pairs, experts, capacity in ((1, 512, 1), (8, 512, 8), (64, 3, 11), (1000, 1, 126)):
        assert heuristics.tile_capacity(pairs, experts) == capacity
        # One expert takes all but one pair of each other: the most tiles of eight rows.
        others = min(experts - 1, pairs - 1)
        assert others + -(-(pairs - others) // 8) <= capacity


def test_the_offset_is_an_operand() -> None:
    """One program serves all ranks."""
    lowered = [lower(arguments(expert_offset=offset)) for offset in (0, 24)]
    assert lowered[0] == lowered[1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            arguments(experts=dense_experts(F32), x=shape(T, H)),
            "x and DenseExperts must be bfloat16, got float32",
        ),
        (arguments(x=shape(T, H)), "x must be bfloat16 or float8_e4m3fn, got float32"),
        (arguments(hidden=72), "H must be a multiple of 16, got 72"),
        (arguments(experts=tensor_experts(513)), "E must be at most 512, got 513"),
        (arguments(top_k=129), "K must be at most 128, got 129"),
        (arguments(tokens=2**22, top_k=5), "T * K must be at most 16777216, got 20971520"),
    ],
    ids=["dense", "float32", "unaligned", "experts", "choices", "pairs"],
)
def test_no_kernel_says_why(args: dict[str, Any], words: str) -> None:
    call = functools.partial(fused_moe, implementation="cuda")
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        jax.eval_shape(call, **args)
