"""Checks of the arguments that say how experts are chosen."""

import math
from typing import Any

import jax.numpy as jnp

from jax_hpc._checks import Dims, check, check_choice, check_dtype, static_int, static_number
from jax_hpc.ops.route_topk.signature import SCORINGS, Params


def check_bias(operator: str, bias: Any, dims: Dims) -> None:
    """Raise unless bias is None or float32 ``[E]``."""
    if bias is not None:
        dims.match("bias", bias, "E")
        check_dtype(operator, "bias", bias, (jnp.float32,))


def make_params(
    operator: str,
    experts: int,
    *,
    k: Any,
    scoring: Any,
    renormalize: Any,
    scale: Any,
    num_zero_experts: Any,
    num_groups: Any,
    topk_groups: Any,
) -> Params:
    """The static parameters, checked against each other and the number of experts."""
    check_choice(operator, "scoring", scoring, SCORINGS)
    k = static_int(operator, "k", k)
    num_zero_experts = static_int(operator, "num_zero_experts", num_zero_experts)
    num_groups = static_int(operator, "num_groups", num_groups)
    topk_groups = static_int(operator, "topk_groups", topk_groups)
    scale = static_number(operator, "scale", scale)
    check(math.isfinite(scale), operator, "scale", expected="finite", got=scale)
    check(1 <= k <= experts, operator, "k", expected=f"1 <= k <= E = {experts}", got=k)
    _check_groups(operator, experts, k, num_groups, topk_groups)
    check(
        0 <= num_zero_experts < experts,
        operator,
        "num_zero_experts",
        expected=f"0 <= num_zero_experts < E = {experts}",
        got=num_zero_experts,
    )
    return Params(
        k=k,
        scoring=scoring,
        renormalize=bool(renormalize),
        scale=scale,
        num_zero_experts=num_zero_experts,
        num_groups=num_groups,
        topk_groups=topk_groups,
    )


def _check_groups(operator: str, experts: int, k: int, num_groups: int, topk_groups: int) -> None:
    check(
        num_groups >= 1 and experts % num_groups == 0,
        operator,
        "num_groups",
        expected=f"a divisor of E = {experts}",
        got=num_groups,
    )
    check(
        1 <= topk_groups <= num_groups,
        operator,
        "topk_groups",
        expected=f"1 <= topk_groups <= num_groups = {num_groups}",
        got=topk_groups,
    )
    size = experts // num_groups
    check(
        num_groups == 1 or size >= 2,
        operator,
        "num_groups",
        expected=f"such that each group has at least 2 of the {experts} experts",
        got=num_groups,
    )
    check(
        topk_groups * size >= k,
        operator,
        "topk_groups",
        expected=f"enough that topk_groups * {size} experts per group >= k = {k}",
        got=topk_groups,
    )
