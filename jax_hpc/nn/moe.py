"""The experts of a Mixture-of-Experts layer."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jax_hpc import fp8
from jax_hpc._checks import check_choice
from jax_hpc.nn.init import normal
from jax_hpc.ops.fused_moe import (
    DenseExperts,
    Fp8BlockExperts,
    Fp8TensorExperts,
    fused_moe,
)
from jax_hpc.ops.fused_moe.weights import BLOCK_ROWS
from jax_hpc.types import Implementation

ExpertFormat = Literal["dense", "fp8_block", "fp8_tensor"]


class FusedMoE(nnx.Module):
    """Gated experts: ``sum_k w_k * down_e(silu(gate_e(x)) * up_e(x))`` over a token's experts.

    gate_up: ``[E, 2, I, H]``, gate first; down: ``[E, H, I]``; bf16 or float32, or fp8 with the
    scales of the format:

    - ``fp8_block``: gate_up_scale ``[E, 2, ceil(I/block_rows), ceil(H/128)]`` and
      down_scale ``[E, ceil(H/128), ceil(I/block_rows)]``;
    - ``fp8_tensor``: gate_scale, up_scale, down_scale ``[E]``, input_scale ``[]``,
      act_scale ``[E]``.

    Inside ``jax.shard_map`` the weights are this rank's part:

    Args:
      expert_axis: mesh axis over which the experts are split; ids stay global.
      reduce_axis: mesh axis or axes over which results are summed (the expert axis, the axis that
        splits I, or both).
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        intermediate_size: int,
        *,
        rngs: nnx.Rngs,
        format: ExpertFormat = "dense",
        block_rows: int = fp8.BLOCK,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        expert_axis: str | None = None,
        reduce_axis: str | tuple[str, ...] | None = None,
        implementation: Implementation = "auto",
    ) -> None:
        check_choice("FusedMoE", "format", format, get_args(ExpertFormat))
        check_choice("FusedMoE", "block_rows", block_rows, BLOCK_ROWS)
        up = (num_experts, 2, intermediate_size, hidden_size)
        down = (num_experts, hidden_size, intermediate_size)
        if format == "dense":
            self.gate_up = nnx.Param(normal(rngs, up, hidden_size, dtype))
            self.down = nnx.Param(normal(rngs, down, intermediate_size, dtype))
        else:
            # Values near one have all of e4m3's bits; the scales bring them down.
            self.gate_up = nnx.Param(normal(rngs, up, 1, fp8.E4M3))
            self.down = nnx.Param(normal(rngs, down, 1, fp8.E4M3))
        wide, narrow = float(hidden_size) ** -0.5, float(intermediate_size) ** -0.5
        if format == "fp8_block":
            rows, columns = -(-intermediate_size // block_rows), -(-hidden_size // fp8.BLOCK)
            self.gate_up_scale = _scales(wide, num_experts, 2, rows, columns)
            self.down_scale = _scales(narrow, num_experts, columns, rows)
        elif format == "fp8_tensor":
            self.gate_scale = _scales(wide, num_experts)
            self.up_scale = _scales(wide, num_experts)
            self.down_scale = _scales(narrow, num_experts)
            self.input_scale = _scales(1.0)
            self.act_scale = _scales(1.0, num_experts)
        self.format = format
        self.block_rows = block_rows
        self.expert_axis = expert_axis
        self.reduce_axis = reduce_axis
        self.implementation: Implementation = implementation

    @property
    def experts(self) -> DenseExperts | Fp8BlockExperts | Fp8TensorExperts:
        """The weights as :func:`jax_hpc.fused_moe` takes them."""
        gate_up, down = self.gate_up[...], self.down[...]
        if self.format == "dense":
            return DenseExperts(gate_up, down)
        if self.format == "fp8_block":
            return Fp8BlockExperts(
                gate_up,
                down,
                self.gate_up_scale[...],
                self.down_scale[...],
                block_rows=self.block_rows,
            )
        return Fp8TensorExperts(
            gate_up,
            down,
            self.gate_scale[...],
            self.up_scale[...],
            self.down_scale[...],
            self.input_scale[...],
            self.act_scale[...],
        )

    def __call__(
        self,
        x: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array,
        *,
        shared_output: jax.Array | None = None,
        identity_weight: jax.Array | None = None,
    ) -> jax.Array:
        """Run the chosen experts.

        Args:
          x: ``[T, H]``. topk_ids: int32 ``[T, K]``, -1 for none. topk_weights: float32 ``[T, K]``.
          shared_output: ``[T, H]`` added to the result; with ``reduce_axis`` this rank's part of
            it, which is summed over the axis along with the experts'.
          identity_weight: float32 ``[T]``; ``identity_weight * x`` is added, once for all ranks.

        Returns:
          ``[T, H]`` of x's dtype.
        """
        experts = self.experts
        offset: jax.Array | int = 0
        num_experts = None
        if self.expert_axis is not None:
            own = experts.gate_up.shape[0]
            offset = jax.lax.axis_index(self.expert_axis) * own
            num_experts = jax.lax.axis_size(self.expert_axis) * own
        whole = self.reduce_axis is None
        y = fused_moe(
            x,
            topk_ids,
            topk_weights,
            experts,
            expert_offset=offset,
            num_experts=num_experts,
            shared_output=shared_output,
            identity_weight=identity_weight if whole else None,
            implementation=self.implementation,
        )
        if self.reduce_axis is None:
            return y
        y = jax.lax.psum(y, self.reduce_axis)
        if identity_weight is None:
            return y
        identity = identity_weight[:, None] * x.astype(jnp.float32)
        return (y.astype(jnp.float32) + identity).astype(y.dtype)


def _scales(value: float, *shape: int) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.full(shape, value, jnp.float32))
