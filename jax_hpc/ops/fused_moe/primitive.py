"""fused_moe as a JAX primitive."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hpc._primitive import Fold, Kernel, Operator
from jax_hpc.fp8 import BLOCK, E4M3
from jax_hpc.ops.fused_moe import heuristics, reference, xla
from jax_hpc.ops.fused_moe.signature import Operands, Params, shape_rule
from jax_hpc.ops.fused_moe.weights import DenseExperts, Fp8BlockExperts, Fp8TensorExperts

_ALIGNED = 16
"""Values of a row that the kernels move at once."""
_MOST_EXPERTS = 512
_MOST_TOP_K = 128
_MOST_PAIRS = 2**24
_MOST_GROUPS = 2**30
"""Groups of 128 columns in x: counted in 32-bit integers."""
_SCALES: Mapping[type, tuple[str, ...]] = {
    DenseExperts: (),
    Fp8TensorExperts: ("gate_scale", "up_scale", "down_scale", "input_scale", "act_scale"),
    Fp8BlockExperts: ("gate_up_scale", "down_scale"),
}
"""Of each kind of experts, in the order in which the handler takes them."""
_OPTIONAL = ("x_scale", "shared_output", "identity_weight")
"""Operands that may be absent, in the order in which the handler takes them: after the others."""


def _unsupported(operands: Operands, params: Params) -> str | None:
    del params
    if isinstance(operands.experts, DenseExperts) and operands.x.dtype != jnp.bfloat16:
        return f"x and DenseExperts must be bfloat16, got {operands.x.dtype.name}"
    if operands.x.dtype not in (jnp.bfloat16, E4M3):
        return f"x must be bfloat16 or float8_e4m3fn, got {operands.x.dtype.name}"
    (tokens, hidden), top_k = operands.x.shape, operands.topk_ids.shape[1]
    if hidden % _ALIGNED != 0:
        return f"H must be a multiple of {_ALIGNED}, got {hidden}"
    limits = {
        "E": (operands.experts.down.shape[0], _MOST_EXPERTS),
        "K": (top_k, _MOST_TOP_K),
        "T * K": (tokens * top_k, _MOST_PAIRS),
        "T * ceil(H / 128)": (tokens * _groups(hidden), _MOST_GROUPS),
    }
    for name, (value, most) in limits.items():
        if value > most:
            return f"{name} must be at most {most}, got {value}"
    return None


def _groups(columns: int) -> int:
    return -(-columns // BLOCK)


def _is_block(operands: Operands) -> bool:
    return isinstance(operands.experts, Fp8BlockExperts)


def _quantizes_x(operands: Operands) -> bool:
    return not isinstance(operands.experts, DenseExperts) and operands.x.dtype != E4M3


def _inputs(operands: Operands) -> Sequence[Any]:
    o, experts = operands, operands.experts
    required = [o.x, o.topk_ids, o.topk_weights, experts.gate_up, experts.down, o.expert_offset]
    scales = [getattr(experts, name) for name in _SCALES[type(experts)]]
    optional = [getattr(o, name) for name in _OPTIONAL]
    return [*required, *scales, *(value for value in optional if value is not None)]


def _attributes(operands: Operands, params: Params) -> Mapping[str, Any]:
    experts = operands.experts
    rows = experts.block_rows if isinstance(experts, Fp8BlockExperts) else 0
    sizes = {"block_rows": np.int32(rows), "chosen_among": np.int32(params.chosen_among or 0)}
    given = {f"has_{name}": getattr(operands, name) is not None for name in _OPTIONAL}
    return {"options": {**sizes, **given, "pdl": True}}


def _workspaces(operands: Operands, params: Params) -> Sequence[jax.ShapeDtypeStruct]:
    """What the kernels pass to each other, as cuda/fused_moe/launch.h lists it."""
    del params
    (tokens, hidden), top_k = operands.x.shape, operands.topk_ids.shape[1]
    num_experts, _, inter = operands.experts.down.shape
    pairs, is_block = tokens * top_k, _is_block(operands)
    is_bf16 = isinstance(operands.experts, DenseExperts)
    width = heuristics.outputs_width(hidden, inter, is_block=is_block, is_bf16=is_bf16)
    array = jax.ShapeDtypeStruct
    tiles = heuristics.tile_capacity(pairs, num_experts)
    spaces = [array((size,), jnp.int32) for size in (4, 4 * tiles, pairs, pairs)]
    spaces.append(array((heuristics.num_counts(tokens, top_k, num_experts),), jnp.uint32))
    if _quantizes_x(operands):
        spaces.append(array((tokens, hidden), E4M3))
        if is_block:
            spaces.append(array((tokens, _groups(hidden)), jnp.float32))
    spaces.append(array((pairs, inter), operands.experts.down.dtype))
    outputs = array((pairs, width), jnp.bfloat16)
    if not is_block:
        return [*spaces, outputs]
    groups = _groups(inter)
    arrivals = array((tiles * groups,), jnp.uint32)
    return [*spaces, array((pairs, groups), jnp.float32), outputs, arrivals]


KERNEL = Kernel(
    target="jax_hpc.fused_moe.v1",
    unsupported=_unsupported,
    attributes=_attributes,
    inputs=_inputs,
    workspaces=_workspaces,
)

OPERATOR = Operator(
    "fused_moe",
    shape_rule=shape_rule,
    reference=reference.fused_moe,
    xla=xla.fused_moe,
    kernel=KERNEL,
    fold=Fold(
        frozenset(
            {"x", "topk_ids", "topk_weights", "x_scale", "shared_output", "identity_weight"}
        ),
        frozenset({"out"}),
    ),
    gradient="it serves inference; train with jax.lax.ragged_dot over sorted tokens instead",
)
