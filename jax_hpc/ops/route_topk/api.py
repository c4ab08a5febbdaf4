"""Public function of route_topk."""

import jax
import jax.numpy as jnp

from jax_hpc._checks import Dims, check_dtype
from jax_hpc.ops.route_topk.checks import check_bias, make_params
from jax_hpc.ops.route_topk.primitive import OPERATOR
from jax_hpc.ops.route_topk.signature import Operands, RouteResult
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
    check_bias(operator, bias, dims)
    params = make_params(
        operator,
        dims["E"],
        k=k,
        scoring=scoring,
        renormalize=renormalize,
        scale=scale,
        num_zero_experts=num_zero_experts,
        num_groups=num_groups,
        topk_groups=topk_groups,
    )
    return OPERATOR(Operands(logits, bias), params, implementation=implementation)
