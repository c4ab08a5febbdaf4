"""XLA's best form of fused_moe: pairs sorted by expert, then tiles or ragged_dot.

A tile is some rows of one expert, so the work is that of the chosen pairs (plus padding), where
the truth multiplies every row with every expert.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from jax_hpc.ops.fused_moe.expert import Rows, apply_expert, prepare_rows, select_expert
from jax_hpc.ops.fused_moe.heuristics import max_tiles, prefers_ragged_dot, tile_rows
from jax_hpc.ops.fused_moe.reference import combine, local_ids
from jax_hpc.ops.fused_moe.signature import Operands, Params, Results
from jax_hpc.ops.fused_moe.weights import DenseExperts, Experts


class SortedPairs(NamedTuple):
    """The (token, choice) pairs, ordered by expert; pairs without an expert come last.

    order: int32 ``[T * K]``, index ``t * K + k`` of each pair.
    tokens: int32 ``[T * K]``, its t.
    counts: int32 ``[E]``, pairs per expert.
    """

    order: jax.Array
    tokens: jax.Array
    counts: jax.Array


Multiply = Callable[[Rows, SortedPairs, Experts], jax.Array]
"""Expert outputs of the sorted pairs, float32 ``[T * K, H]``; unspecified where no expert is."""


def fused_moe(operands: Operands, params: Params) -> Results:
    del params
    experts, num_pairs = operands.experts, operands.topk_ids.size
    on_gpu: Multiply = functools.partial(by_tiles, count_tiles=False)
    if isinstance(experts, DenseExperts) and prefers_ragged_dot(num_pairs, len(experts.down)):
        on_gpu = by_ragged_dot
    on_cpu: Multiply = functools.partial(by_tiles, count_tiles=True)

    def multiply(rows: Rows, pairs: SortedPairs, experts: Experts) -> jax.Array:
        choose = jax.lax.platform_dependent
        return cast(jax.Array, choose(rows, pairs, experts, cpu=on_cpu, default=on_gpu))

    return run_sorted(operands, multiply)


def run_sorted(operands: Operands, multiply: Multiply) -> Results:
    """The whole layer around one way to multiply sorted pairs."""
    ids = local_ids(operands)
    shape = (*ids.shape, operands.x.shape[1])
    if ids.size == 0:
        return combine(operands, ids, jnp.zeros(shape, jnp.float32))
    pairs = _sort_pairs(ids, len(operands.experts.down))
    outputs = multiply(prepare_rows(operands), pairs, operands.experts)
    chosen = jnp.zeros_like(outputs).at[pairs.order].set(outputs)
    return combine(operands, ids, chosen.reshape(shape))


def _sort_pairs(ids: jax.Array, num_experts: int) -> SortedPairs:
    flat = jnp.where(ids >= 0, ids, num_experts).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")
    return SortedPairs(order, order // ids.shape[1], counts)


def by_tiles(rows: Rows, pairs: SortedPairs, experts: Experts, *, count_tiles: bool) -> jax.Array:
    """Multiply tile by tile.

    ``count_tiles``: run only the tiles that this routing has. Otherwise the trip count is
    static, which on a GPU is worth the empty tiles: a loop with a computed one synchronises
    with the host in each iteration.
    """
    num_pairs, num_experts = pairs.order.shape[0], pairs.counts.shape[0]
    size = tile_rows(num_pairs, num_experts)
    tiles_of = -(-pairs.counts // size)
    last_tile, last_pair = jnp.cumsum(tiles_of), jnp.cumsum(pairs.counts)
    bound = max_tiles(num_pairs, num_experts, size)
    tile = jnp.arange(bound, dtype=jnp.int32)
    expert = jnp.searchsorted(last_tile, tile, side="right").astype(jnp.int32)
    is_used = expert < num_experts
    expert = jnp.minimum(expert, num_experts - 1)
    within = tile - (last_tile[expert] - tiles_of[expert])
    start = last_pair[expert] - pairs.counts[expert] + within * size
    start = jnp.where(is_used, start, num_pairs)  # an unused tile writes into the margin
    tokens = jnp.pad(pairs.tokens, (0, size))

    def run_tile(index: jax.Array, outputs: jax.Array) -> jax.Array:
        here = jax.lax.dynamic_slice_in_dim(tokens, start[index], size)
        picked = jax.tree.map(lambda a: a[here], rows)
        result = apply_expert(picked, select_expert(experts, expert[index]))
        # Rows past the expert's last pair are overwritten by the tiles that follow.
        return jax.lax.dynamic_update_slice_in_dim(outputs, result, start[index], axis=0)

    outputs = jnp.zeros((num_pairs + size, rows.values.shape[1]), jnp.float32)
    trips = last_tile[-1] if count_tiles else bound
    return jax.lax.fori_loop(0, trips, run_tile, outputs)[:num_pairs]


def by_ragged_dot(rows: Rows, pairs: SortedPairs, experts: Experts) -> jax.Array:
    """Multiply unquantised experts with one ragged product for gate and up and one for down."""
    assert isinstance(experts, DenseExperts)
    x = rows.values[pairs.tokens]
    num_experts, _, inter, hidden = experts.gate_up.shape
    gate_up = experts.gate_up.reshape(num_experts, 2 * inter, hidden)
    gate, up = jnp.split(_ragged_product(x, gate_up, pairs.counts), 2, axis=1)
    activation = (jax.nn.silu(gate) * up).astype(x.dtype)
    return _ragged_product(activation, experts.down, pairs.counts)


def _ragged_product(x: jax.Array, weight: jax.Array, counts: jax.Array) -> jax.Array:
    """``x [T * K, C] @ weight[e] [R, C].T``, e being the group of the row."""
    return jax.lax.ragged_dot_general(
        x,
        weight,
        counts,
        jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((1,), (2,)), ((), ())),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[0],
        ),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
