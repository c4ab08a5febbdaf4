"""Public function of router_topk."""

import jax

from jax_hpc._checks import Dims
from jax_hpc.ops.route_topk.checks import check_bias, make_params
from jax_hpc.ops.route_topk.signature import RouteResult
from jax_hpc.ops.router_gemm.checks import check_operands
from jax_hpc.ops.router_gemm.weights import SplitWeight
from jax_hpc.ops.router_topk.primitive import OPERATOR
from jax_hpc.ops.router_topk.signature import Operands, Params
from jax_hpc.types import Implementation


def router_topk(
    x: jax.Array,
    weight: SplitWeight,
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
    """The k experts of each token and their weights, from its activations.

    :func:`jax_hpc.route_topk` of the logits that :func:`jax_hpc.router_gemm` gives; the kernels
    give the same bits as the two calls with ``implementation="cuda"``. With few tokens the second
    kernel starts while the first one ends, which two calls cannot do. Take the two calls where
    the logits are wanted as well.

    Args:
      x: ``[T, H]`` bf16 or float32. float32 has no kernel.
      weight: :class:`SplitWeight` of ``[E, H]``; E counts the zero experts.
      k: experts per token.
      scoring, bias, renormalize, scale, num_zero_experts, num_groups, topk_groups: see
        :func:`jax_hpc.route_topk`.
      implementation: see :data:`jax_hpc.types.Implementation`.

    Returns:
      :class:`RouteResult` (ids ``[T, K]``, weights ``[T, K]``, identity_weight ``[T]``).

    Raises:
      ValueError: shapes or values do not fit.
      TypeError: a dtype is not supported, weight is not a SplitWeight, or a static argument is
        not a Python number.
      NotImplementedError: ``implementation="cuda"`` and no kernel takes the case.
    """
    operator = "router_topk"
    dims = Dims(operator)
    check_operands(operator, x, weight, dims)
    check_bias(operator, bias, dims)
    route = make_params(
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
    return OPERATOR(Operands(x, weight, bias), Params(route), implementation=implementation)
