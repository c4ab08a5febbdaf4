"""Expert weights as pytrees: bf16, per-tensor fp8 and block fp8; and how to quantise them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_hpc import fp8
from jax_hpc._checks import Dims, check_choice, check_dtype, check_scale, static_number

BLOCK_ROWS = (128, 64)
"""Rows of I that share one scale of a block-quantised weight."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseExperts:
    """Unquantised experts.

    gate_up: ``[E, 2, I, H]`` bf16 or float32; index 0 of the second axis is gate, 1 is up.
    down: ``[E, H, I]``, same dtype.
    """

    gate_up: jax.Array
    down: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8TensorExperts:
    """Experts in fp8 with one scale per matrix and static activation scales (Hy3-FP8).

    A scale multiplies: ``W = gate_up[e, 0] * gate_scale[e]``.

    gate_up: ``[E, 2, I, H]`` float8_e4m3fn, gate first; gate and up keep their own scales.
    down: ``[E, H, I]`` float8_e4m3fn.
    gate_scale, up_scale, down_scale: float32 ``[E]``.
    input_scale: float32 ``[]``, scale of x: one for all, the largest that any expert's gate or
      up was calibrated with, since x is quantised once.
    act_scale: float32 ``[E]`` or ``[]``, scale of the intermediate.
    """

    gate_up: jax.Array
    down: jax.Array
    gate_scale: jax.Array
    up_scale: jax.Array
    down_scale: jax.Array
    input_scale: jax.Array
    act_scale: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8BlockExperts:
    """Experts in fp8 with a scale per block and dynamic activation scales (Qwen3-FP8, LongCat).

    A weight block is ``block_rows`` of I by 128 of H, in gate_up and down alike. block_rows 64
    serves tensor-parallel shards that start in the middle of a 128 block (I = 192). Activations
    get a scale per token and 128 columns.

    gate_up: ``[E, 2, I, H]`` float8_e4m3fn, gate first.
    down: ``[E, H, I]`` float8_e4m3fn.
    gate_up_scale: float32 ``[E, 2, ceil(I / block_rows), ceil(H / 128)]``.
    down_scale: float32 ``[E, ceil(H / 128), ceil(I / block_rows)]``.
    block_rows: 128 or 64, static.
    """

    gate_up: jax.Array
    down: jax.Array
    gate_up_scale: jax.Array
    down_scale: jax.Array
    block_rows: int = dataclasses.field(default=fp8.BLOCK, metadata={"static": True})


Experts = DenseExperts | Fp8TensorExperts | Fp8BlockExperts


def expand_blocks(scale: jax.Array, rows: int, columns: int, shape: tuple[int, int]) -> jax.Array:
    """A scale per block of ``rows x columns`` as one per element of ``[..., *shape]``."""
    scale = jnp.repeat(jnp.repeat(scale, rows, axis=-2), columns, axis=-1)
    return scale[..., : shape[0], : shape[1]]


def quantize_groups(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantise ``[T, C]`` with a dynamic scale per row and 128 columns.

    Returns:
      float8_e4m3fn ``[T, C]`` and float32 ``[T, ceil(C / 128)]``.
    """
    rows, columns = x.shape
    groups = -(-columns // fp8.BLOCK)
    padded = jnp.pad(x, ((0, 0), (0, groups * fp8.BLOCK - columns)))
    scale = fp8.amax_scale(padded.reshape(rows, groups, fp8.BLOCK), axis=2)
    return fp8.quantize(x, expand_groups(scale, columns)), scale


def expand_groups(scale: jax.Array, columns: int) -> jax.Array:
    """A scale per 128 columns ``[T, ceil(C / 128)]`` as one per element ``[T, C]``."""
    return jnp.repeat(scale, fp8.BLOCK, axis=1)[:, :columns]


def quantize_experts_blockwise(experts: DenseExperts, *, block_rows: int = 128) -> Fp8BlockExperts:
    """Quantise bf16 or float32 experts to block fp8: scale amax / 448 of each block.

    Raises:
      ValueError: shapes do not fit, or block_rows is neither 128 nor 64.
      TypeError: the weights are neither bf16 nor float32.
    """
    operator = "quantize_experts_blockwise"
    _check_dense(operator, experts)
    check_choice(operator, "block_rows", block_rows, BLOCK_ROWS)
    gate_up, gate_up_scale = quantize_blocks(experts.gate_up, block_rows, fp8.BLOCK)
    down, down_scale = quantize_blocks(experts.down, fp8.BLOCK, block_rows)
    return Fp8BlockExperts(gate_up, down, gate_up_scale, down_scale, block_rows)


def quantize_experts_per_tensor(
    experts: DenseExperts, *, input_scale: float, act_scale: float
) -> Fp8TensorExperts:
    """Quantise bf16 or float32 experts to per-tensor fp8: scale amax / 448 of each matrix.

    Args:
      input_scale, act_scale: static scales of x and of the intermediate, from calibration:
        their largest magnitude / 448. Larger values saturate.

    Raises:
      ValueError: shapes do not fit, or a scale is not finite and positive.
      TypeError: the weights are neither bf16 nor float32, or a scale is not a Python number.
    """
    operator = "quantize_experts_per_tensor"
    _check_dense(operator, experts)
    for argument, scale in (("input_scale", input_scale), ("act_scale", act_scale)):
        check_scale(operator, argument, static_number(operator, argument, scale))
    gate_up, halves = quantize_matrices(experts.gate_up)
    down, down_scale = quantize_matrices(experts.down)
    return Fp8TensorExperts(
        gate_up=gate_up,
        down=down,
        gate_scale=halves[:, 0],
        up_scale=halves[:, 1],
        down_scale=down_scale,
        input_scale=jnp.asarray(input_scale, jnp.float32),
        act_scale=jnp.asarray(act_scale, jnp.float32),
    )


def _check_dense(operator: str, experts: DenseExperts) -> None:
    dims = Dims(operator)
    dims.match("experts.gate_up", experts.gate_up, "E 2 I H")
    dims.match("experts.down", experts.down, "E H I")
    check_dtype(operator, "experts.gate_up", experts.gate_up, (jnp.bfloat16, jnp.float32))
    check_dtype(operator, "experts.down", experts.down, (experts.gate_up.dtype,))


@jax.jit
def quantize_matrices(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantise ``[..., N, K]`` with a scale for each matrix: float8_e4m3fn, float32 ``[...]``."""
    scale = fp8.amax_scale(weight, axis=(-2, -1))
    return fp8.quantize(weight, scale[..., None, None]), scale


@functools.partial(jax.jit, static_argnums=(1, 2))
def quantize_blocks(weight: jax.Array, rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """Quantise ``[..., N, K]`` with a scale for each block of ``rows x columns``.

    Returns:
      float8_e4m3fn of weight's shape, and float32 ``[..., ceil(N / rows), ceil(K / columns)]``.
    """
    height, width = weight.shape[-2:]
    down, across = -(-height // rows), -(-width // columns)
    margins = [(0, 0)] * (weight.ndim - 2)
    margins += [(0, down * rows - height), (0, across * columns - width)]
    blocks = jnp.pad(weight, margins).reshape(*weight.shape[:-2], down, rows, across, columns)
    scale = fp8.amax_scale(blocks, axis=(-3, -1))
    return fp8.quantize(weight, expand_blocks(scale, rows, columns, (height, width))), scale
