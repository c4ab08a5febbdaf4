"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, in float32 with one rounding at the end.

    weight: ``[features]``. Source: Zhang and Sennrich, arXiv 1910.07467.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-6,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
    ) -> None:
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., features]`` -> the same shape and dtype."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normalised = wide * jax.lax.rsqrt(mean_square + jnp.float32(self.eps))
        return (normalised * self.weight[...].astype(jnp.float32)).astype(x.dtype)
