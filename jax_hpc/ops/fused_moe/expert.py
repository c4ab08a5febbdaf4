"""One expert's feed-forward network on some rows, with the exact rounding points.

Shared by the truth and by XLA's form, which differ only in which rows they give to whom.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_hpc import fp8
from jax_hpc.ops.fused_moe.signature import Operands
from jax_hpc.ops.fused_moe.weights import (
    DenseExperts,
    Experts,
    Fp8BlockExperts,
    Fp8TensorExperts,
    expand_blocks,
    expand_groups,
    quantize_groups,
)


class Rows(NamedTuple):
    """Token rows as the experts take them.

    values: ``[T, H]`` in x's dtype (dense), or float8_e4m3fn.
    scale: ``[T, ceil(H / 128)]`` for block experts, else None.
    """

    values: jax.Array
    scale: jax.Array | None


def prepare_rows(operands: Operands) -> Rows:
    """x, quantised where the experts want it quantised and it is not yet."""
    x, experts = operands.x, operands.experts
    if isinstance(experts, DenseExperts):
        return Rows(x, None)
    if isinstance(experts, Fp8TensorExperts):
        return Rows(x if x.dtype == fp8.E4M3 else fp8.quantize(x, experts.input_scale), None)
    if x.dtype == fp8.E4M3:
        return Rows(x, operands.x_scale)
    return Rows(*quantize_groups(x))


def dequantized_x(operands: Operands) -> jax.Array:
    """x in float32, as identity experts return it."""
    if operands.x.dtype != fp8.E4M3:
        return operands.x.astype(jnp.float32)
    if isinstance(operands.experts, Fp8TensorExperts):
        return fp8.dequantize(operands.x, operands.experts.input_scale)
    assert operands.x_scale is not None
    return fp8.dequantize(operands.x, expand_groups(operands.x_scale, operands.x.shape[1]))


def select_expert(experts: Experts, index: jax.Array) -> Experts:
    """The experts pytree of one expert: every ``[E, ...]`` array at ``index``."""

    def pick(array: jax.Array) -> jax.Array:
        if array.ndim == 0:  # one for all experts
            return array
        return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)

    return jax.tree.map(pick, experts)


def apply_expert(rows: Rows, expert: Experts) -> jax.Array:
    """down(SiLU(gate(x)) * up(x)) of one expert, float32 ``[T, H]``."""
    if isinstance(expert, DenseExperts):
        return _dense(rows, expert)
    if isinstance(expert, Fp8TensorExperts):
        return _fp8_tensor(rows, expert)
    return _fp8_block(rows, expert)


def _dense(rows: Rows, expert: DenseExperts) -> jax.Array:
    x = rows.values
    activation = _silu_and_mul(_product(x, expert.gate_up[0]), _product(x, expert.gate_up[1]))
    return _product(activation.astype(x.dtype), expert.down)


def _fp8_tensor(rows: Rows, expert: Fp8TensorExperts) -> jax.Array:
    # e4m3 values are exact in bf16, and products of two of them in float32.
    x, gate_up = rows.values.astype(jnp.bfloat16), expert.gate_up.astype(jnp.bfloat16)
    gate = _product(x, gate_up[0]) * (expert.input_scale * expert.gate_scale)
    up = _product(x, gate_up[1]) * (expert.input_scale * expert.up_scale)
    activation = fp8.quantize(_silu_and_mul(gate, up), expert.act_scale).astype(jnp.bfloat16)
    down = _product(activation, expert.down.astype(jnp.bfloat16))
    return down * (expert.act_scale * expert.down_scale)


def _fp8_block(rows: Rows, expert: Fp8BlockExperts) -> jax.Array:
    # Dequantising first differs from scaling the blocks' partial sums by float32 rounding only.
    inter, hidden = expert.gate_up.shape[1:]
    block = expert.block_rows
    weights = fp8.dequantize(
        expert.gate_up, expand_blocks(expert.gate_up_scale, block, fp8.BLOCK, (inter, hidden))
    )
    assert rows.scale is not None
    x = fp8.dequantize(rows.values, expand_groups(rows.scale, hidden))
    values, scale = quantize_groups(
        _silu_and_mul(_product(x, weights[0]), _product(x, weights[1]))
    )
    activation = fp8.dequantize(values, expand_groups(scale, inter))
    down_scale = expand_blocks(expert.down_scale, fp8.BLOCK, block, (hidden, inter))
    return _product(activation, fp8.dequantize(expert.down, down_scale))


def _silu_and_mul(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x [T, C] @ weight [R, C].T`` accumulated in float32."""
    return jnp.einsum(
        "tc,rc->tr",
        x,
        weight,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
