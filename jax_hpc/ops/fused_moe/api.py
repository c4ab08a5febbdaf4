"""Public function of fused_moe."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jax_hpc._checks import Dims, check, check_choice, check_dtype, check_scale, static_int
from jax_hpc.fp8 import BLOCK, E4M3
from jax_hpc.ops.fused_moe.primitive import OPERATOR
from jax_hpc.ops.fused_moe.signature import Operands, Params, output_dtype
from jax_hpc.ops.fused_moe.weights import (
    BLOCK_ROWS,
    DenseExperts,
    Experts,
    Fp8BlockExperts,
    Fp8TensorExperts,
)
from jax_hpc.types import Implementation

_OPERATOR = "fused_moe"
_MOST_INT32 = 2**31 - 1


def fused_moe(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    experts: Experts,
    *,
    x_scale: jax.Array | float | None = None,
    expert_offset: jax.Array | int = 0,
    num_experts: int | None = None,
    shared_output: jax.Array | None = None,
    identity_weight: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Mixture-of-Experts layer: ``sum_k w_k * down(SiLU(gate(x)) * up(x))``, expert ids[k].

    To the weighted sum ``shared_output`` and ``identity_weight * x`` are added. Ids outside
    ``[expert_offset, expert_offset + E)``, such as -1, are skipped, whatever their weight: a
    rank of expert parallelism passes its own experts and its offset, and sums over the ranks.

    Products accumulate in float32 and the sum over k runs in float32, in order, with one
    rounding at the end. In between, per kind of experts:

    - :class:`DenseExperts`: the intermediate is rounded to x's dtype before down.
    - :class:`Fp8TensorExperts`: x is quantised by ``input_scale``, the intermediate by
      ``act_scale`` of its expert.
    - :class:`Fp8BlockExperts`: x and the intermediate are quantised with a scale of amax / 448
      per token and 128 columns.

    Args:
      x: ``[T, H]`` bf16 or float32; or float8_e4m3fn with ``x_scale``, for fp8 experts.
      topk_ids: ``[T, K]`` int32. The same id may occur twice in a row; both count.
      topk_weights: ``[T, K]`` float32.
      experts: :class:`DenseExperts` of x's dtype, :class:`Fp8TensorExperts` or
        :class:`Fp8BlockExperts`. I must be a multiple of 16.
      x_scale: x is fp8 already and this is its scale, float32: ``[]`` or a positive number for
        per-tensor experts, ``[T, ceil(H / 128)]`` for block experts.
      expert_offset: first expert id of ``experts``, int or int32 ``[]`` (may be traced).
      num_experts: experts of all ranks, among which the tokens choose; E by default. A hint of
        how many rows an expert gets, by which the work is cut: results differ by roundings.
      shared_output: ``[T, H]`` in the output's dtype, or None.
      identity_weight: ``[T]`` float32, summed weights of zero experts
        (:func:`jax_hpc.route_topk`), or None.
      implementation: see :data:`jax_hpc.types.Implementation`.

    Returns:
      ``[T, H]`` in x's dtype, bf16 where x is fp8.

    Raises:
      ValueError: shapes or values do not fit.
      TypeError: a dtype or the type of experts is not supported, or num_experts is no Python int.
      NotImplementedError: ``implementation="cuda"`` and no kernel takes the case.
    """
    dims = Dims(_OPERATOR)
    dims.match("x", x, "T H")
    dims.match("topk_ids", topk_ids, "T K")
    dims.match("topk_weights", topk_weights, "T K")
    check_dtype(_OPERATOR, "topk_ids", topk_ids, (jnp.int32,))
    check_dtype(_OPERATOR, "topk_weights", topk_weights, (jnp.float32,))
    check(dims["K"] >= 1, _OPERATOR, "topk_ids", expected="of K >= 1", got=dims["K"])
    _check_experts(dims, experts)
    experts, x_scale = _check_x(dims, x, experts, x_scale)
    if shared_output is not None:
        dims.match("shared_output", shared_output, "T H")
        out_dtype = output_dtype(x.dtype)
        check_dtype(_OPERATOR, "shared_output", shared_output, (out_dtype,))
    if identity_weight is not None:
        dims.match("identity_weight", identity_weight, "T")
        check_dtype(_OPERATOR, "identity_weight", identity_weight, (jnp.float32,))
    if num_experts is not None:
        num_experts = static_int(_OPERATOR, "num_experts", num_experts)
        fits = dims["E"] <= num_experts <= _MOST_INT32
        expected = f"E = {dims['E']} to {_MOST_INT32}"
        check(fits, _OPERATOR, "num_experts", expected=expected, got=num_experts)
    operands = Operands(
        x=x,
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        experts=experts,
        x_scale=x_scale,
        expert_offset=_offset(expert_offset),
        shared_output=shared_output,
        identity_weight=identity_weight,
    )
    return OPERATOR(operands, Params(num_experts), implementation=implementation).out


def _check_experts(dims: Dims, experts: Experts) -> None:
    if not isinstance(experts, Experts):
        raise TypeError(
            f"{_OPERATOR}: argument 'experts' must be DenseExperts, Fp8TensorExperts or "
            f"Fp8BlockExperts, got {type(experts).__name__}"
        )
    dims.match("experts.gate_up", experts.gate_up, "E 2 I H")
    dims.match("experts.down", experts.down, "E H I")
    check(dims["E"] >= 1, _OPERATOR, "experts.gate_up", expected="of E >= 1", got=dims["E"])
    check(
        dims["I"] % 16 == 0,
        _OPERATOR,
        "experts.gate_up",
        expected="of an intermediate size I that is a multiple of 16",
        got=dims["I"],
    )
    if isinstance(experts, DenseExperts):
        return
    for name in ("gate_up", "down"):
        check_dtype(_OPERATOR, f"experts.{name}", getattr(experts, name), (E4M3,))
    if isinstance(experts, Fp8BlockExperts):
        _check_block_scales(dims, experts)
        return
    for name in ("gate_scale", "up_scale", "down_scale"):
        _check_scale(dims, f"experts.{name}", getattr(experts, name), "E")
    _check_scale(dims, "experts.input_scale", experts.input_scale, "")
    per_expert = jnp.ndim(experts.act_scale) > 0
    _check_scale(dims, "experts.act_scale", experts.act_scale, "E" if per_expert else "")


def _check_block_scales(dims: Dims, experts: Fp8BlockExperts) -> None:
    check_choice(_OPERATOR, "experts.block_rows", experts.block_rows, BLOCK_ROWS)
    dims.bind("blocks(I)", -(-dims["I"] // experts.block_rows), "ceil(I / block_rows)")
    dims.bind("blocks(H)", -(-dims["H"] // BLOCK), "ceil(H / 128)")
    gate_up, down = "E 2 blocks(I) blocks(H)", "E blocks(H) blocks(I)"
    _check_scale(dims, "experts.gate_up_scale", experts.gate_up_scale, gate_up)
    _check_scale(dims, "experts.down_scale", experts.down_scale, down)


def _check_scale(dims: Dims, argument: str, scale: jax.Array, pattern: str) -> None:
    dims.match(argument, scale, pattern)
    check_dtype(_OPERATOR, argument, scale, (jnp.float32,))


def _check_x(
    dims: Dims, x: jax.Array, experts: Experts, x_scale: jax.Array | float | None
) -> tuple[Experts, jax.Array | None]:
    """Check x and its scale; a per-tensor scale of x takes the place of input_scale."""
    if isinstance(experts, DenseExperts):
        check_dtype(_OPERATOR, "x", x, (jnp.bfloat16, jnp.float32))
        for name in ("gate_up", "down"):
            check_dtype(_OPERATOR, f"experts.{name}", getattr(experts, name), (x.dtype,))
    else:
        check_dtype(_OPERATOR, "x", x, (jnp.bfloat16, jnp.float32, E4M3))
    is_fp8 = x.dtype == E4M3
    check(
        (x_scale is not None) == is_fp8,
        _OPERATOR,
        "x_scale",
        expected="given for a float8_e4m3fn x, and None for any other",
        got=f"{'None' if x_scale is None else 'a scale'} with x in {x.dtype.name}",
    )
    if x_scale is None:
        return experts, None
    if isinstance(experts, Fp8BlockExperts):
        _check_scale(dims, "x_scale", cast(jax.Array, x_scale), "T blocks(H)")
        return experts, cast(jax.Array, x_scale)
    if isinstance(x_scale, int | float):
        check_scale(_OPERATOR, "x_scale", x_scale)
        x_scale = jnp.asarray(x_scale, jnp.float32)
    _check_scale(dims, "x_scale", x_scale, "")
    return dataclasses.replace(cast(Fp8TensorExperts, experts), input_scale=x_scale), None


def _offset(expert_offset: jax.Array | int) -> jax.Array:
    if isinstance(expert_offset, int | np.integer):
        inside = 0 <= expert_offset <= _MOST_INT32
        expected = f"0 to {_MOST_INT32}"
        check(inside, _OPERATOR, "expert_offset", expected=expected, got=expert_offset)
        return jnp.asarray(expert_offset, jnp.int32)
    Dims(_OPERATOR).match("expert_offset", expert_offset, "")
    check_dtype(_OPERATOR, "expert_offset", expert_offset, (jnp.int32,))
    return expert_offset
