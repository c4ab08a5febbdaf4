"""The router of a Mixture-of-Experts layer."""

import jax
import jax.numpy as jnp
from flax import nnx

from jax_hpc.nn.init import normal
from jax_hpc.ops.route_topk import RouteResult
from jax_hpc.ops.router_gemm import SplitWeight, split_router_weight
from jax_hpc.ops.router_topk import router_topk
from jax_hpc.types import Implementation


class SplitRouter(nnx.Module):
    """Float32-class router logits, then the choice of ``top_k`` experts for each token.

    parts: bf16 ``[terms, E, H]``, the split router weight (see ``split_router_weight``); one term
        is exact for a checkpoint whose router is bf16, float32 routers take two or three. No full
        weight is kept: where there is no kernel, each call sums the parts.
    bias: float32 ``[E]`` for selection only, or None.

    Args:
      hidden_size: H. num_experts: E, zero experts included. top_k: K.
      scoring, renormalize, scale, num_zero_experts, num_groups, topk_groups: see
        :func:`jax_hpc.route_topk`.
      use_bias: whether the model has a selection bias.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        rngs: nnx.Rngs,
        terms: int = 2,
        scoring: str = "softmax",
        renormalize: bool = False,
        scale: float = 1.0,
        use_bias: bool = False,
        num_zero_experts: int = 0,
        num_groups: int = 1,
        topk_groups: int = 1,
        implementation: Implementation = "auto",
    ) -> None:
        weight = normal(rngs, (num_experts, hidden_size), hidden_size, jnp.float32)
        self.parts = nnx.Param(split_router_weight(weight, terms).parts)
        self.bias = nnx.Param(jnp.zeros((num_experts,), jnp.float32)) if use_bias else None
        self.top_k = top_k
        self.scoring = scoring
        self.renormalize = renormalize
        self.scale = scale
        self.num_zero_experts = num_zero_experts
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.implementation: Implementation = implementation

    def __call__(self, x: jax.Array, active: jax.Array | None = None) -> RouteResult:
        """Choose experts.

        Args:
          x: ``[T, H]``.
          active: bool ``[T]``; rows that are False get no expert (ids -1, identity weight 0) and
            cost none.
        """
        result = router_topk(
            x,
            SplitWeight(self.parts[...]),
            self.top_k,
            scoring=self.scoring,
            bias=None if self.bias is None else self.bias[...],
            renormalize=self.renormalize,
            scale=self.scale,
            num_zero_experts=self.num_zero_experts,
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
            implementation=self.implementation,
        )
        if active is None:
            return result
        return result._replace(
            ids=jnp.where(active[:, None], result.ids, -1),
            identity_weight=jnp.where(active, result.identity_weight, 0.0),
        )
