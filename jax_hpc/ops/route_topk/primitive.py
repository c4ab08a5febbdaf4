"""route_topk as a JAX primitive."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_hpc._primitive import Fold, Kernel, Operator
from jax_hpc.ops.route_topk import reference
from jax_hpc.ops.route_topk.signature import SCORINGS, Operands, Params, shape_rule

MOST_EXPERTS = 32768
"""More have no kernel: their scores do not fit into shared memory (kMostExperts in config.h)."""
_MOST_TOKENS = 2**31 - 2**10
"""The kernel counts in 32-bit integers and rounds up to whole CTAs."""


def too_many_experts(experts: int) -> str | None:
    """Why no kernel chooses from that many experts, or None."""
    if experts > MOST_EXPERTS:
        return f"at most {MOST_EXPERTS} experts, got {experts}"
    return None


def _unsupported(operands: Operands, params: Params) -> str | None:
    del params
    tokens, experts = operands.logits.shape
    if tokens > _MOST_TOKENS:
        return f"T must be at most {_MOST_TOKENS}, got {tokens}"
    return too_many_experts(experts)


def options(params: Params) -> dict[str, Any]:
    """The parameters as a handler takes them: Options in cuda/route_topk/config.h."""
    return {
        "k": np.int32(params.k),
        "scoring": np.int32(SCORINGS.index(params.scoring)),
        "renormalize": params.renormalize,
        "scale": np.float32(params.scale),
        "num_zero_experts": np.int32(params.num_zero_experts),
        "num_groups": np.int32(params.num_groups),
        "topk_groups": np.int32(params.topk_groups),
    }


def _attributes(operands: Operands, params: Params) -> Mapping[str, Any]:
    del operands
    return {"options": options(params)}


KERNEL = Kernel(target="jax_hpc.route_topk.v1", unsupported=_unsupported, attributes=_attributes)

OPERATOR = Operator(
    "route_topk",
    shape_rule=shape_rule,
    reference=reference.route_topk,
    kernel=KERNEL,
    fold=Fold(frozenset({"logits"}), frozenset({"ids", "weights", "identity_weight"})),
    gradient="it serves inference; differentiate the softmax or sigmoid of the logits and "
    "jax.lax.top_k instead",
)
