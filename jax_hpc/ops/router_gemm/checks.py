"""Checks of the arguments of a router product."""

from typing import Any

import jax.numpy as jnp

from jax_hpc._checks import Dims, check, check_dtype
from jax_hpc.ops.router_gemm.weights import SplitWeight


def check_operands(operator: str, x: Any, weight: Any, dims: Dims) -> None:
    """Raise unless x ``[T, H]`` and weight, a SplitWeight of ``[E, H]``, fit; binds T, H and E."""
    if not isinstance(weight, SplitWeight):
        raise TypeError(
            f"{operator}: argument 'weight' must be a SplitWeight (see split_router_weight), "
            f"got {type(weight).__name__}"
        )
    dims.match("x", x, "T H")
    check_dtype(operator, "x", x, (jnp.bfloat16, jnp.float32))
    dims.match("weight.parts", weight.parts, "terms E H")
    check_dtype(operator, "weight.parts", weight.parts, (jnp.bfloat16,))
    terms = dims["terms"]
    check(terms in (1, 2, 3), operator, "weight.parts", expected="1 to 3 terms", got=terms)
    if weight.full is not None:
        dims.match("weight.full", weight.full, "E H")
        check_dtype(operator, "weight.full", weight.full, (jnp.float32,))
