"""Expert weights: quantising them."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_hpc.ops.fused_moe import (
    DenseExperts,
    quantize_experts_blockwise,
    quantize_experts_per_tensor,
)
from tests.support.numerics import assert_close

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


@pytest.mark.parametrize(
    ("scale", "error", "words"),
    [
        (0.0, ValueError, "must be finite and > 0, got 0.0"),
        (float("nan"), ValueError, "must be finite and > 0, got nan"),
        (jnp.ones(()), TypeError, "must be a Python number .*, got an array"),
    ],
)
@pytest.mark.parametrize("argument", ["input_scale", "act_scale"])
def test_per_tensor_refuses_a_scale(argument: str, scale, error, words: str) -> None:
    experts = DenseExperts(jnp.zeros((1, 2, 16, 8)), jnp.zeros((1, 8, 16)))
    scales = {"input_scale": 1.0, "act_scale": 1.0, argument: scale}
    with pytest.raises(error, match=f"argument '{argument}' {words}"):
        quantize_experts_per_tensor(experts, **scales)
