"""Truth of route_topk: score, choose by biased score, weigh by plain score."""

import jax
import jax.numpy as jnp

from jax_hpc.ops.route_topk.signature import RENORMALIZE_EPS, Operands, Params, RouteResult

_MAX = float(jnp.finfo(jnp.float32).max)


def route_topk(operands: Operands, params: Params) -> RouteResult:
    num_experts = operands.logits.shape[1]
    logits = jnp.nan_to_num(operands.logits, nan=-jnp.inf, posinf=_MAX, neginf=-jnp.inf)
    alive = jnp.any(logits > -jnp.inf, axis=1, keepdims=True)
    scores = _scores(jnp.where(alive, logits, 0.0), params.scoring)

    # Ties go to the lower id: top_k is stable.
    _, ids = jax.lax.top_k(_selection_scores(scores, operands.bias, params), params.k)
    ids = jnp.where(alive, ids, jnp.arange(params.k, dtype=jnp.int32))

    weights = jnp.take_along_axis(scores, ids, axis=1)
    if params.renormalize:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + RENORMALIZE_EPS)
    weights = jnp.where(alive, weights * params.scale, 0.0)

    is_zero_expert = ids >= num_experts - params.num_zero_experts
    return RouteResult(
        ids=jnp.where(is_zero_expert, -1, ids),
        weights=jnp.where(is_zero_expert, 0.0, weights),
        identity_weight=jnp.sum(jnp.where(is_zero_expert, weights, 0.0), axis=1),
    )


def _scores(logits: jax.Array, scoring: str) -> jax.Array:
    return jax.nn.softmax(logits, axis=1) if scoring == "softmax" else jax.nn.sigmoid(logits)


def _selection_scores(scores: jax.Array, bias: jax.Array | None, params: Params) -> jax.Array:
    """Scores that decide the choice: biased, and -inf outside the best groups."""
    if bias is not None:
        # Kept finite, so that an expert outside the chosen groups is always below one inside.
        scores = jnp.nan_to_num(scores + bias, nan=-_MAX, posinf=_MAX, neginf=-_MAX)
    if params.topk_groups == params.num_groups:
        return scores
    grouped = scores.reshape(scores.shape[0], params.num_groups, -1)
    two_best, _ = jax.lax.top_k(grouped, 2)
    _, groups = jax.lax.top_k(jnp.sum(two_best, axis=2), params.topk_groups)
    chosen = jnp.any(groups[:, :, None] == jnp.arange(params.num_groups), axis=1)
    return jnp.where(chosen[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
