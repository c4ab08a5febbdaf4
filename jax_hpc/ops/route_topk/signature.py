"""What route_topk takes and gives: operands, static parameters, results and their shapes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

SCORINGS = ("softmax", "sigmoid")
RENORMALIZE_EPS = 1e-20
"""Added to the sum of the chosen weights before dividing by it (Hy3, DeepSeek-V3)."""


class Operands(NamedTuple):
    logits: jax.Array
    bias: jax.Array | None


class RouteResult(NamedTuple):
    """Routing of T tokens.

    ids: int32 ``[T, K]``, best first; -1 where the chosen expert is a zero expert.
    weights: float32 ``[T, K]``; 0 where ids is -1.
    identity_weight: float32 ``[T]``: the summed weights of the chosen zero experts.
    """

    ids: Any
    weights: Any
    identity_weight: Any


@dataclasses.dataclass(frozen=True)
class Params:
    k: int
    scoring: str
    renormalize: bool
    scale: float
    num_zero_experts: int
    num_groups: int
    topk_groups: int


def shape_rule(operands: Operands, params: Params) -> RouteResult:
    tokens = operands.logits.shape[0]
    return RouteResult(
        ids=jax.ShapeDtypeStruct((tokens, params.k), jnp.int32),
        weights=jax.ShapeDtypeStruct((tokens, params.k), jnp.float32),
        identity_weight=jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
