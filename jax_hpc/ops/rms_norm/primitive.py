"""rms_norm as a JAX primitive."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_hpc._primitive import Fold, Kernel, Operator
from jax_hpc.ops.rms_norm import reference
from jax_hpc.ops.rms_norm.signature import Operands, Params, shape_rule

CHUNK = 8
"""Values that the kernel reads at once (kChunk in config.h)."""
MOST_HIDDEN = 16384
"""A row stays in the registers of one CTA (kMostHidden in config.h)."""
_MOST_TOKENS = 2**31 - 1
"""CTAs of a launch."""
_OPTIONAL = ("residual", "out_scale")
"""Operands that may be absent, in the order in which the handler takes them: after the others."""


def _unsupported(operands: Operands, params: Params) -> str | None:
    del params
    tokens, hidden = operands.x.shape
    if operands.x.dtype != jnp.bfloat16:
        return f"x must be bfloat16, got {operands.x.dtype.name}"
    if hidden % CHUNK != 0 or hidden > MOST_HIDDEN:
        return f"H must be a multiple of {CHUNK} and at most {MOST_HIDDEN}, got {hidden}"
    if tokens > _MOST_TOKENS:
        return f"T must be at most {_MOST_TOKENS}, got {tokens}"
    return None


def _inputs(operands: Operands) -> Sequence[Any]:
    optional = [getattr(operands, name) for name in _OPTIONAL]
    return [operands.x, operands.weight, *(value for value in optional if value is not None)]


def _attributes(operands: Operands, params: Params) -> Mapping[str, Any]:
    given = {name: getattr(operands, name) is not None for name in _OPTIONAL}
    return {"eps": np.float32(params.eps), "given": given}


KERNEL = Kernel(
    target="jax_hpc.rms_norm.v1",
    unsupported=_unsupported,
    attributes=_attributes,
    inputs=_inputs,
    aliases={"residual": "residual"},
)

OPERATOR = Operator(
    "rms_norm",
    shape_rule=shape_rule,
    reference=reference.rms_norm,
    kernel=KERNEL,
    fold=Fold(frozenset({"x", "residual"}), frozenset({"y", "residual"})),
    gradient="it serves inference; write the norm in jax.numpy to train",
)
