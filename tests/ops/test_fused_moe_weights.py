"""Expert weights: quantising them, and stacking them from a checkpoint's matrices."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_hpc.ops.fused_moe import (
    DenseExperts,
    ExpertTensors,
    check_scales,
    load_dense_experts,
    load_fp8_block_experts,
    load_fp8_tensor_experts,
    quantize_experts_blockwise,
    quantize_experts_per_tensor,
)
from tests.support.numerics import assert_bitwise, assert_close

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E, INTER, HIDDEN = 3, 144, 160


def dense(rng: np.random.Generator) -> DenseExperts:
    gate_up = rng.standard_normal((E, 2, INTER, HIDDEN)).astype(np.float32)
    down = rng.standard_normal((E, HIDDEN, INTER)).astype(np.float32)
    gate_up[0, 1] = 0.0  # a matrix of zeros has scale 1
    return DenseExperts(jnp.asarray(gate_up), jnp.asarray(down))


def assert_quantised(weight: Any, scale: np.ndarray, want: np.ndarray) -> None:
    """``weight * scale`` is within half a step of e4m3 of ``want``, relative to the scale."""
    weight = np.asarray(weight)
    assert weight.dtype == E4M3
    step = np.maximum(np.abs(want) / 16, scale * 2.0**-10)
    assert_close(weight.astype(np.float64) * scale, want, atol=step * 1.001)


@pytest.mark.parametrize("block_rows", [128, 64])
def test_quantize_blockwise(block_rows: int, rng: np.random.Generator) -> None:
    source = dense(rng)
    got = quantize_experts_blockwise(source, block_rows=block_rows)
    assert got.block_rows == block_rows
    for weight, scale, want, block in (
        (got.gate_up, got.gate_up_scale, source.gate_up, (block_rows, 128)),
        (got.down, got.down_scale, source.down, (128, block_rows)),
    ):
        want, scale = np.asarray(want, np.float64), np.asarray(scale)
        amax = np.zeros(scale.shape)
        for i in range(scale.shape[-2]):
            for j in range(scale.shape[-1]):
                rows = slice(i * block[0], (i + 1) * block[0])
                columns = slice(j * block[1], (j + 1) * block[1])
                amax[..., i, j] = np.abs(want[..., rows, columns]).max(axis=(-2, -1))
        assert_close(scale, np.where(amax == 0, 1.0, amax / 448), rtol=1e-6)
        i, j = np.indices(want.shape[-2:])
        assert_quantised(weight, scale[..., i // block[0], j // block[1]], want)


def test_quantize_per_tensor(rng: np.random.Generator) -> None:
    source = dense(rng)
    got = quantize_experts_per_tensor(source, input_scale=0.5, act_scale=0.25)
    assert_close(got.input_scale, 0.5)
    assert_close(got.act_scale, 0.25)
    halves = np.stack([got.gate_scale, got.up_scale], axis=1)
    amax = np.abs(np.asarray(source.gate_up)).max(axis=(2, 3))
    assert_close(halves, np.where(amax == 0, 1.0, amax / 448), rtol=1e-6)
    assert_quantised(got.gate_up, halves[:, :, None, None], np.asarray(source.gate_up))
    assert_quantised(got.down, np.asarray(got.down_scale)[:, None, None], np.asarray(source.down))


@pytest.mark.parametrize(
    ("experts", "error", "words"),
    [
        (
            DenseExperts(jnp.zeros((1, 3, 16, 8)), jnp.zeros((1, 8, 16))),
            ValueError,
            r"'experts.gate_up' must have shape \[E, 2, I, H\]",
        ),
        (
            DenseExperts(jnp.zeros((1, 2, 16, 8), jnp.float16), jnp.zeros((1, 8, 16))),
            TypeError,
            "'experts.gate_up' must be bfloat16 or float32",
        ),
        (
            DenseExperts(jnp.zeros((1, 2, 16, 8)), jnp.zeros((1, 8, 16), jnp.bfloat16)),
            TypeError,
            "'experts.down' must be float32, got bfloat16",
        ),
    ],
)
def test_quantizers_refuse(experts, error, words) -> None:
    with pytest.raises(error, match=f"quantize_experts_blockwise: argument {words}"):
        quantize_experts_blockwise(experts)
    with pytest.raises(error, match=f"quantize_experts_per_tensor: argument {words}"):
        quantize_experts_per_tensor(experts, input_scale=1.0, act_scale=1.0)


def test_blockwise_refuses_other_blocks() -> None:
    experts = DenseExperts(jnp.zeros((1, 2, 16, 8)), jnp.zeros((1, 8, 16)))
    with pytest.raises(ValueError, match="argument 'block_rows' must be one of 128, 64, got 32"):
        quantize_experts_blockwise(experts, block_rows=32)


# From a checkpoint.


def tensors(rng: np.random.Generator, dtype: Any) -> list[ExpertTensors]:
    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    return [
        ExpertTensors(matrix(INTER, HIDDEN), matrix(INTER, HIDDEN), matrix(HIDDEN, INTER))
        for _ in range(E)
    ]


def assert_stacked(experts: Any, source: list[ExpertTensors]) -> None:
    assert_bitwise(experts.gate_up, np.stack([np.stack([t.gate, t.up]) for t in source]))
    assert_bitwise(experts.down, np.stack([t.down for t in source]))


def per_tensor(rng: np.random.Generator) -> list[ExpertTensors]:
    names = ("gate_scale", "up_scale", "down_scale")
    # Weight scales as Hy3-FP8 stores them (bf16 scalars), input scales as float32 [1].
    return [
        dataclasses.replace(
            t,
            **{n: np.asarray(rng.uniform(0.5, 2), ml_dtypes.bfloat16) for n in names},
            **{
                n.replace("scale", "input_scale"): rng.uniform(0.5, 2, 1).astype(np.float32)
                for n in names
            },
        )
        for t in tensors(rng, E4M3)
    ]


def blockwise(rng: np.random.Generator) -> list[ExpertTensors]:
    def scales(*shape: int) -> np.ndarray:
        return rng.uniform(0.5, 2, shape).astype(ml_dtypes.bfloat16)

    return [
        dataclasses.replace(
            t, gate_scale=scales(2, 2), up_scale=scales(2, 2), down_scale=scales(2, 2)
        )
        for t in tensors(rng, E4M3)
    ]


def test_load_dense(rng: np.random.Generator) -> None:
    source = tensors(rng, ml_dtypes.bfloat16)
    assert_stacked(load_dense_experts(E, source.__getitem__), source)


def test_load_per_tensor(rng: np.random.Generator) -> None:
    source = per_tensor(rng)
    got = load_fp8_tensor_experts(E, source.__getitem__)
    assert_stacked(got, source)
    for name in ("gate_scale", "up_scale", "down_scale"):
        want = np.asarray([getattr(t, name) for t in source]).astype(np.float32)
        assert_bitwise(getattr(got, name), want)
    inputs = [t.gate_input_scale for t in source] + [t.up_input_scale for t in source]
    assert_bitwise(got.input_scale, np.max(inputs))
    assert_bitwise(got.act_scale, np.concatenate([t.down_input_scale for t in source]))


def test_load_blockwise(rng: np.random.Generator) -> None:
    source = blockwise(rng)
    got = load_fp8_block_experts(E, source.__getitem__)
    assert_stacked(got, source)
    halves = np.stack([np.stack([t.gate_scale, t.up_scale]) for t in source])
    assert_bitwise(got.gate_up_scale, halves.astype(np.float32))
    down = np.stack([t.down_scale for t in source])
    assert_bitwise(got.down_scale, down.astype(np.float32))
    assert got.block_rows == 128


def test_load_a_shard_that_starts_inside_a_block(rng: np.random.Generator) -> None:
    # Rows 64 to 207 of a matrix whose scales cover rows 0-127, 128-255: 64-row scales 1 to 3.
    whole = rng.uniform(0.5, 2, (2, 2)).astype(np.float32)
    rows = np.repeat(whole, 2, axis=0)[1:4]
    source = [
        dataclasses.replace(t, gate_scale=rows, up_scale=rows, down_scale=rows.T)
        for t in tensors(rng, E4M3)
    ]
    got = load_fp8_block_experts(E, source.__getitem__, block_rows=64)
    assert got.gate_up_scale.shape == (E, 2, 3, 2) and got.down_scale.shape == (E, 2, 3)
    assert_bitwise(got.gate_up_scale[1, 0], rows)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "expert 1: up weight scale is missing"),
        (np.float32(0.0), "expert 1: up weight scale must be finite and > 0, got 0.0"),
        (np.float32(-2.0), "expert 1: up weight scale must be finite and > 0, got -2.0"),
        (np.float32(np.inf), "expert 1: up weight scale must be finite and > 0, got inf"),
        (np.float32(np.nan), "expert 1: up weight scale must be finite and > 0, got nan"),
        (
            np.ones(2, np.float32),
            r"expert 1: up weight scale must be one number, got shape \(2,\)",
        ),
    ],
)
def test_per_tensor_scales_are_checked(value, words, rng: np.random.Generator) -> None:
    source = per_tensor(rng)
    source[1] = dataclasses.replace(source[1], up_scale=value)
    with pytest.raises(ValueError, match=words):
        load_fp8_tensor_experts(E, source.__getitem__)


def test_input_scales_are_checked(rng: np.random.Generator) -> None:
    source = per_tensor(rng)
    source[2] = dataclasses.replace(source[2], down_input_scale=None)
    with pytest.raises(ValueError, match="expert 2: down input scale is missing"):
        load_fp8_tensor_experts(E, source.__getitem__)
    source[2] = dataclasses.replace(source[2], down_input_scale=np.float32(np.inf))
    with pytest.raises(ValueError, match="expert 2: down input scale must be finite"):
        load_fp8_tensor_experts(E, source.__getitem__)


def test_block_scales_are_checked(rng: np.random.Generator) -> None:
    source = blockwise(rng)
    good = source[2]
    scale = np.ones((2, 2), np.float32)
    scale[1, 0] = np.nan
    source[2] = dataclasses.replace(good, down_scale=scale)
    words = r"expert 2: down weight scale must be finite and > 0, got nan at block \(1, 0\)"
    with pytest.raises(ValueError, match=words):
        load_fp8_block_experts(E, source.__getitem__)
    source[2] = dataclasses.replace(good, gate_scale=None)
    with pytest.raises(ValueError, match="expert 2: gate weight scale is missing"):
        load_fp8_block_experts(E, source.__getitem__)
    source[2] = dataclasses.replace(good, gate_scale=np.float32(1.0))
    with pytest.raises(ValueError, match=r"one number per block, shape \(2, 2\), got \(\)"):
        load_fp8_block_experts(E, source.__getitem__)
    with pytest.raises(ValueError, match="argument 'block_rows' must be one of 128, 64"):
        load_fp8_block_experts(E, source.__getitem__, block_rows=256)


def test_check_scales_takes_good_ones() -> None:
    check_scales("gate weight scale", np.ones((4, 2, 2), np.float32))
    with pytest.raises(ValueError, match="expert 3: x must be finite and > 0, got 0.0"):
        check_scales("x", np.asarray([1, 1, 1, 0], np.float32))


def test_an_expert_of_another_shape_or_dtype_is_named(rng: np.random.Generator) -> None:
    source = tensors(rng, np.float32)
    wrong = [*source[:2], dataclasses.replace(source[2], up=source[2].up[:-16])]
    with pytest.raises(ValueError, match=r"expert 2: up must be float32 of shape \(144, 160\)"):
        load_dense_experts(E, wrong.__getitem__)
    with pytest.raises(ValueError, match="expert 0: gate must be float8_e4m3fn .*got float32"):
        load_fp8_tensor_experts(E, source.__getitem__)
    with pytest.raises(ValueError, match="num_experts must be at least 1, got 0"):
        load_dense_experts(0, source.__getitem__)


def test_experts_are_read_once_and_in_order(rng: np.random.Generator) -> None:
    source, reads = tensors(rng, np.float32), []

    def read(index: int) -> ExpertTensors:
        reads.append(index)
        return source[index]

    assert_stacked(load_dense_experts(E, read), source)
    assert reads == list(range(E))
