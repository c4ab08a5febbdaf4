"""A float32 router weight as a sum of bf16 parts, which tensor cores multiply exactly."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hpc._checks import Dims, check_choice, check_dtype

RESIDUAL_SCALE = 256.0
"""Each part after the first holds the remainder times this: 2^8, the width of a bf16 mantissa."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitWeight:
    """Router weight W ``[E, H]`` as ``W ~= sum_i parts[i] / 256^i``.

    parts: bf16 ``[terms, E, H]``, terms 1 to 3.
    full: float32 ``[E, H]``, W itself, kept for XLA's form; or None.
    """

    parts: Any
    full: Any = None

    @property
    def terms(self) -> int:
        return self.parts.shape[0]


def split_router_weight(
    weight: jax.Array | np.ndarray, terms: int = 2, *, keep_full: bool = False
) -> SplitWeight:
    """Split a router weight once, when a model is loaded.

    The first part is W rounded to bf16, each further one the remainder, times 256, rounded to
    bf16. Two terms hold W to 2^-17 of its magnitude, three to 2^-25. A weight that is bf16
    already is exact in one.

    Args:
      weight: ``[E, H]`` float32 or bf16; a numpy array gives numpy arrays.
      terms: 1, 2 or 3.
      keep_full: keep W in float32 as well, so that XLA's form needs no sum of parts.

    Raises:
      TypeError: weight is neither float32 nor bf16.
      ValueError: weight is not a matrix, or terms is not 1, 2 or 3.
    """
    operator = "split_router_weight"
    Dims(operator).match("weight", weight, "E H")
    check_dtype(operator, "weight", weight, (jnp.float32, jnp.bfloat16))
    check_choice(operator, "terms", terms, (1, 2, 3))
    full = weight.astype(jnp.float32)
    parts, remainder = [], full
    for _ in range(terms):
        part = remainder.astype(jnp.bfloat16)
        parts.append(part)
        remainder = (remainder - part.astype(jnp.float32)) * RESIDUAL_SCALE
    # Loaders split on the host, before the weight goes to a device.
    stack = np.stack if isinstance(weight, np.ndarray) else jnp.stack
    return SplitWeight(stack(parts), full if keep_full else None)
