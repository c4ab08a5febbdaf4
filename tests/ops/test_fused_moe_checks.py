"""What a call of fused_moe must not be: every check, by the words of its message."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import fp8
from jax_hpc.ops.fused_moe import DenseExperts, Fp8BlockExperts, Fp8TensorExperts, fused_moe

change = dataclasses.replace
DENSE = DenseExperts(np.zeros((2, 2, 16, 8), np.float32), np.zeros((2, 8, 16), np.float32))
ONE = np.ones((), np.float32)
TENSOR = Fp8TensorExperts(
    *(np.zeros(a.shape, fp8.E4M3) for a in (DENSE.gate_up, DENSE.down)),
    *(np.ones(2, np.float32) for _ in range(3)),
    input_scale=ONE,
    act_scale=ONE,
)
BLOCK = Fp8BlockExperts(
    TENSOR.gate_up, TENSOR.down, np.ones((2, 2, 1, 1), np.float32), np.ones((2, 1, 1), np.float32)
)
HALF = np.float16
F8X = np.zeros((3, 8), fp8.E4M3)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"x": np.zeros(8, np.float32)}, ValueError, r"'x' must have shape \[T, H\]"),
        ({"x": np.zeros((3, 8), HALF)}, TypeError, "'x' must be bfloat16 or float32, got float16"),
        ({"x": F8X, "x_scale": ONE}, TypeError, "'x' must be bfloat16 or float32, got float8"),
        ({"x": F8X, "experts": TENSOR}, ValueError, "'x_scale' must be given for a float8"),
        (
            {"x_scale": 1.0, "experts": TENSOR},
            ValueError,
            "'x_scale' must be given .*a scale with",
        ),
        (
            {"x": F8X, "experts": TENSOR, "x_scale": np.ones(3, np.float32)},
            ValueError,
            r"'x_scale' must have shape \[\]",
        ),
        (
            {"x": F8X, "experts": TENSOR, "x_scale": 0.0},
            ValueError,
            "'x_scale' must be finite and > 0, got 0.0",
        ),
        (
            {"x": F8X, "experts": BLOCK, "x_scale": 1.0},
            TypeError,
            r"'x_scale' must be an array of shape \[T, blocks\(H\)\], got float",
        ),
        (
            {"x": F8X, "experts": BLOCK, "x_scale": np.ones((3, 2), np.float32)},
            ValueError,
            r"'x_scale' must have shape \[T, blocks\(H\)\] with T = 3 from 'x', blocks\(H\) = 1",
        ),
        ({"topk_ids": np.zeros((4, 2), np.int32)}, ValueError, "'topk_ids' must .*T = 3 from 'x'"),
        ({"topk_ids": np.zeros((3, 2))}, TypeError, "'topk_ids' must be int32"),
        ({"topk_weights": np.zeros((3, 1), np.float32)}, ValueError, "'topk_weights' .*K = 2"),
        ({"topk_weights": np.zeros((3, 2), HALF)}, TypeError, "'topk_weights' must be float32"),
        (
            {"topk_ids": np.zeros((3, 0), np.int32), "topk_weights": np.zeros((3, 0), np.float32)},
            ValueError,
            "'topk_ids' must be of K >= 1",
        ),
        ({"experts": DENSE.down}, TypeError, "'experts' must be DenseExperts, .*got ndarray"),
        (
            {"experts": change(DENSE, gate_up=np.zeros((2, 3, 16, 8), np.float32))},
            ValueError,
            r"'experts.gate_up' must have shape \[E, 2, I, H\]",
        ),
        (
            {"experts": change(DENSE, down=np.zeros((2, 16, 8), np.float32))},
            ValueError,
            "'experts.down' must have shape .*I = 16 from 'experts.gate_up'",
        ),
        (
            {"experts": DenseExperts(np.zeros((2, 2, 24, 8)), np.zeros((2, 8, 24)))},
            ValueError,
            "I that is a multiple of 16, got 24",
        ),
        (
            {"experts": DenseExperts(np.zeros((0, 2, 16, 8)), np.zeros((0, 8, 16)))},
            ValueError,
            "'experts.gate_up' must be of E >= 1",
        ),
        (
            {"experts": change(DENSE, down=DENSE.down.astype(HALF))},
            TypeError,
            "'experts.down' must be float32, got float16",
        ),
        ({"experts": change(TENSOR, down=DENSE.down)}, TypeError, "'experts.down' must be float8"),
        (
            {"experts": change(TENSOR, up_scale=np.ones(3, np.float32))},
            ValueError,
            "'experts.up_scale' must have shape .*E = 2",
        ),
        (
            {"experts": change(TENSOR, input_scale=np.ones(1, np.float32))},
            ValueError,
            r"'experts.input_scale' must have shape \[\]",
        ),
        (
            {"experts": change(TENSOR, act_scale=np.ones(1, np.float32))},
            ValueError,
            r"'experts.act_scale' must have shape \[E\]",
        ),
        (
            {"experts": change(TENSOR, gate_scale=np.ones(2, HALF))},
            TypeError,
            "'experts.gate_scale' must be float32",
        ),
        (
            {"experts": change(BLOCK, gate_up_scale=np.ones((2, 2, 2, 1), np.float32))},
            ValueError,
            r"'experts.gate_up_scale' must have shape \[E, 2, blocks\(I\), blocks\(H\)\]",
        ),
        (
            {"experts": change(BLOCK, down_scale=np.ones((2, 1, 2), np.float32))},
            ValueError,
            r"blocks\(I\) = 1 from 'ceil\(I / block_rows\)'",
        ),
        (
            {"experts": change(BLOCK, block_rows=32)},
            ValueError,
            "'experts.block_rows' must be one",
        ),
        ({"num_experts": 1}, ValueError, "'num_experts' must be E = 2 to 2147483647, got 1"),
        ({"num_experts": 2**31}, ValueError, "'num_experts' must be E = 2 to .*, got 2147483648"),
        ({"num_experts": 2.0}, TypeError, "'num_experts' must be a Python int .*, got 2.0"),
        ({"num_experts": True}, TypeError, "'num_experts' must be a Python int .*, got True"),
        ({"num_experts": ONE}, TypeError, "'num_experts' must be a Python int .*, got an array"),
        ({"expert_offset": -1}, ValueError, "'expert_offset' must be 0 to 2147483647, got -1"),
        ({"expert_offset": np.int64(-1)}, ValueError, "'expert_offset' must be 0 to .*, got -1"),
        ({"expert_offset": 2**31}, ValueError, "'expert_offset' must be 0 to .*, got 2147483648"),
        ({"expert_offset": ONE}, TypeError, "'expert_offset' must be int32"),
        ({"expert_offset": np.zeros(2, np.int32)}, ValueError, "'expert_offset' must have shape"),
        ({"shared_output": np.zeros((3, 4), np.float32)}, ValueError, "'shared_output' .*H = 8"),
        ({"shared_output": np.zeros((3, 8), HALF)}, TypeError, "'shared_output' must be float32"),
        ({"identity_weight": np.zeros(4, np.float32)}, ValueError, "'identity_weight' .*T = 3"),
        ({"identity_weight": np.zeros(3, HALF)}, TypeError, "'identity_weight' must be float32"),
    ],
)
def test_refuses(changes, error, words) -> None:
    arguments = {
        "x": np.zeros((3, 8), np.float32),
        "topk_ids": np.zeros((3, 2), np.int32),
        "topk_weights": np.zeros((3, 2), np.float32),
        "experts": DENSE,
        **changes,
    }
    with pytest.raises(error, match=f"fused_moe: argument .*{words}"):
        fused_moe(**arguments)


def test_refuses_a_kernel_and_a_gradient() -> None:
    ids, weights = jnp.zeros((3, 2), jnp.int32), jnp.zeros((3, 2))
    experts = jax.tree.map(jnp.asarray, DENSE)
    with pytest.raises(NotImplementedError, match="fused_moe: no CUDA kernel"):
        fused_moe(jnp.zeros((3, 8)), ids, weights, experts, implementation="cuda")
    with pytest.raises(NotImplementedError, match="fused_moe cannot be differentiated"):
        jax.grad(lambda x: fused_moe(x, ids, weights, experts).sum())(jnp.zeros((3, 8)))
