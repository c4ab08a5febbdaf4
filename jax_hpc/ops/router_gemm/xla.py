"""XLA's best form of router_gemm: one float32 product at full precision."""

import jax
import jax.numpy as jnp

from jax_hpc.ops.router_gemm.heuristics import prefers_parts
from jax_hpc.ops.router_gemm.signature import Operands, Params, Results
from jax_hpc.ops.router_gemm.weights import RESIDUAL_SCALE, SplitWeight


def router_gemm(operands: Operands, params: Params) -> Results:
    del params
    terms, tokens = operands.weight.terms, operands.x.shape[0]
    full = None if prefers_parts(tokens=tokens, terms=terms) else operands.weight.full
    weight = full if full is not None else _sum_of_parts(operands.weight)
    return Results(
        # HIGHEST, or the GPU multiplies in TF32 with errors near 1e-3.
        jnp.einsum(
            "th,eh->te",
            operands.x.astype(jnp.float32),
            weight,
            precision=jax.lax.Precision.HIGHEST,
        )
    )


def _sum_of_parts(weight: SplitWeight) -> jax.Array:
    parts = weight.parts.astype(jnp.float32)
    return sum(
        (parts[i] * RESIDUAL_SCALE**-i for i in reversed(range(weight.terms))),
        start=jnp.zeros_like(parts[0]),
    )
