"""Dense layers: weights as checkpoints store them, products at the precision of their dtype."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_hpc.nn.init import normal


def project(
    x: jax.Array, weight: jax.Array, out_dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """``x @ weight.T`` for x ``[..., in]`` and weight ``[out, in]``, accumulated in float32.

    Float32 operands are multiplied at full precision; a GPU would use TF32 by default.
    """
    full = x.dtype == jnp.float32
    return jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if full else None,
        preferred_element_type=jnp.dtype(out_dtype or x.dtype),
    )


class Linear(nnx.Module):
    """``y = x @ weight.T`` without bias.

    weight: ``[out_features, in_features]``, the layout of checkpoints.

    Args:
      reduce_axis: mesh axis over which in_features are split; the partial products are summed
        over it (row-parallel layers inside ``jax.shard_map``).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        reduce_axis: str | None = None,
    ) -> None:
        self.weight = nnx.Param(normal(rngs, (out_features, in_features), in_features, dtype))
        self.reduce_axis = reduce_axis

    def __call__(self, x: jax.Array) -> jax.Array:
        """x ``[..., in_features]`` -> ``[..., out_features]`` of x's dtype."""
        y = project(x, self.weight[...])
        return y if self.reduce_axis is None else jax.lax.psum(y, self.reduce_axis)


class Embedding(nnx.Module):
    """Token embedding. weight: ``[V, H]``."""

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
    ) -> None:
        self.weight = nnx.Param(normal(rngs, (num_embeddings, features), 1, dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 ``[...]`` -> ``[..., H]``; ids outside the vocabulary are clamped into it."""
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")


class GatedMLP(nnx.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up as one product.

    gate_up_proj: Linear H -> 2 I, gate rows first; down_proj: Linear I -> H.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        reduce_axis: str | None = None,
    ) -> None:
        options: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, **options)
        self.down_proj = Linear(intermediate_size, hidden_size, reduce_axis=reduce_axis, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up_proj(x).astype(jnp.float32), 2, axis=-1)
        return self.down_proj((jax.nn.silu(gate) * up).astype(x.dtype))
