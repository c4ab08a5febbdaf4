"""Initial values of parameters, for models that are not filled from a checkpoint."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx


def normal(
    rngs: nnx.Rngs, shape: Sequence[int], fan_in: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Normal values of variance ``1 / fan_in``, so that products keep the scale of their input."""
    values = jax.random.normal(rngs.params(), tuple(shape), jnp.float32)
    return (values * float(fan_in) ** -0.5).astype(dtype)
