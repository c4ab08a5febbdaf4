"""Truth of fused_moe: every expert looks at every row, and each row takes those it chose."""

import jax
import jax.numpy as jnp

from jax_hpc.ops.fused_moe.expert import (
    apply_expert,
    dequantized_x,
    prepare_rows,
    select_expert,
)
from jax_hpc.ops.fused_moe.signature import Operands, Params, Results, output_dtype


def fused_moe(operands: Operands, params: Params) -> Results:
    del params
    rows = prepare_rows(operands)
    ids = local_ids(operands)

    def visit(chosen: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        out = apply_expert(rows, select_expert(operands.experts, index))
        return jnp.where((ids == index)[:, :, None], out[:, None, :], chosen), None

    tokens, hidden = operands.x.shape
    chosen = jnp.zeros((tokens, ids.shape[1], hidden), jnp.float32)
    num_experts = operands.experts.down.shape[0]
    chosen, _ = jax.lax.scan(visit, chosen, jnp.arange(num_experts, dtype=jnp.int32))
    return combine(operands, ids, chosen)


def local_ids(operands: Operands) -> jax.Array:
    """Indices into this call's experts; -1 where the id is not one of them."""
    ids, first = operands.topk_ids, operands.expert_offset
    # Compared before subtracting, so that no garbage id can wrap around into the range.
    is_local = (ids >= first) & (ids - first < operands.experts.down.shape[0])
    return jnp.where(is_local, ids - first, -1)


def combine(operands: Operands, ids: jax.Array, chosen: jax.Array) -> Results:
    """Weighted sum of ``chosen [T, K, H]`` in the order of k, and what is added to it."""
    # Selected, not multiplied by 0: the weight or the output of a skipped choice may be NaN.
    weighted = operands.topk_weights[:, :, None] * chosen
    weighted = jnp.where((ids >= 0)[:, :, None], weighted, 0.0)
    total = jnp.zeros(operands.x.shape, jnp.float32)
    for k in range(ids.shape[1]):
        total = total + weighted[:, k]
    if operands.shared_output is not None:
        total = total + operands.shared_output.astype(jnp.float32)
    if operands.identity_weight is not None:
        total = total + operands.identity_weight[:, None] * dequantized_x(operands)
    return Results(total.astype(output_dtype(operands.x.dtype)))
