"""Root-mean-square normalisation."""

from typing import overload

import jax
import jax.numpy as jnp
from flax import nnx

from jax_hpc.ops.rms_norm import rms_norm
from jax_hpc.types import Implementation


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
        implementation: Implementation = "auto",
    ) -> None:
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps
        self.implementation: Implementation = implementation

    @overload
    def __call__(self, x: jax.Array) -> jax.Array: ...
    @overload
    def __call__(self, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]: ...
    def __call__(
        self, x: jax.Array, residual: jax.Array | None = None
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """``[..., features]`` -> the same shape and dtype.

        With a residual of x's shape and dtype: the norm of their sum, and the sum, rounded to that
        dtype: what the next layer adds to.
        """
        rows = (-1, x.shape[-1])
        out = rms_norm(
            x.reshape(rows),
            self.weight[...],
            residual=None if residual is None else residual.reshape(rows),
            eps=self.eps,
            implementation=self.implementation,
        )
        y = out.y.reshape(x.shape)
        return y if residual is None else (y, out.residual.reshape(x.shape))
