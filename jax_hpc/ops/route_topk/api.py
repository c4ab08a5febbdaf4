"""Public function of route_topk."""

import math

import jax
import jax.numpy as jnp

from jax_hpc._checks import Dims, check, check_choice, check_dtype, static_int, static_number
from jax_hpc.ops.route_topk.primitive import OPERATOR
from jax_hpc.ops.route_topk.signature import SCORINGS, Operands, Params, RouteResult
from jax_hpc.types import Implementation


def route_topk(
    logits: jax.Array,
    k: int,
    *,
    scoring: str = "softmax",
    bias: jax.Array | None = None,
    renormalize: bool = False,
    scale: float = 1.0,
    num_zero_experts: int = 0,
    num_groups: int = 1,
    topk_groups: int = 1,
    implementation: Implementation = "auto",
) -> RouteResult:
    """The k experts of each token and their weights.

    ``s = softmax(logits)`` over all E, or ``sigmoid(logits)``; the k experts with the largest
    ``s + bias`` are chosen, ties going to the lower id; ``w = s[ids]``, divided by
    ``sum(w) + 1e-20`` if ``renormalize``, times ``scale``. All of it in float32.

    With ``num_groups > 1`` the experts form that many equal groups of neighbours; a group's
    score is the sum of its two best ``s + bias``, and only experts of the best ``topk_groups``
    groups can be chosen (DeepSeek-V3).

    The last ``num_zero_experts`` of the E experts are zero experts, which return their input
    (LongCat-Flash): a chosen one gets id -1 and weight 0, and its weight is added to
    ``identity_weight``. :func:`jax_hpc.fused_moe` takes all three results as they are.

    A NaN logit counts as -inf and a +inf logit as the largest float32. A row without any finite
    logit (padding) gets ids 0 to k-1 with weights 0 and no identity weight.

    Args:
      logits: ``[T, E]`` float32; E counts the zero experts.
      k: experts per token.
      scoring: ``"softmax"`` (Qwen3, LongCat-Flash) or ``"sigmoid"`` (Hy3, DeepSeek-V3).
      bias: ``[E]`` float32, added to the scores for the choice only; or None.
      renormalize: make the k weights sum to ``scale``.
      scale: factor on the weights.
      num_zero_experts: how many of the last experts are zero experts.
      num_groups: groups that the experts fall into; must divide E.
      topk_groups: groups that stay eligible.
      implementation: see :data:`jax_hpc.types.Implementation`.

    Returns:
      :class:`RouteResult` (ids ``[T, K]``, weights ``[T, K]``, identity_weight ``[T]``).

    Raises:
      ValueError: shapes or values do not fit.
      TypeError: logits or bias are not float32, or a static argument is not a Python number.
      NotImplementedError: ``implementation="cuda"`` and no kernel takes the case.
    """
    operator = "route_topk"
    dims = Dims(operator)
    dims.match("logits", logits, "T E")
    check_dtype(operator, "logits", logits, (jnp.float32,))
    if bias is not None:
        dims.match("bias", bias, "E")
        check_dtype(operator, "bias", bias, (jnp.float32,))
    check_choice(operator, "scoring", scoring, SCORINGS)
    k = static_int(operator, "k", k)
    num_zero_experts = static_int(operator, "num_zero_experts", num_zero_experts)
    num_groups = static_int(operator, "num_groups", num_groups)
    topk_groups = static_int(operator, "topk_groups", topk_groups)
    scale = static_number(operator, "scale", scale)
    check(math.isfinite(scale), operator, "scale", expected="finite", got=scale)
    experts = dims["E"]
    check(1 <= k <= experts, operator, "k", expected=f"1 <= k <= E = {experts}", got=k)
    _check_groups(operator, experts, k, num_groups, topk_groups)
    check(
        0 <= num_zero_experts < experts,
        operator,
        "num_zero_experts",
        expected=f"0 <= num_zero_experts < E = {experts}",
        got=num_zero_experts,
    )
    params = Params(
        k=k,
        scoring=scoring,
        renormalize=bool(renormalize),
        scale=scale,
        num_zero_experts=num_zero_experts,
        num_groups=num_groups,
        topk_groups=topk_groups,
    )
    return OPERATOR(Operands(logits, bias), params, implementation=implementation)


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
