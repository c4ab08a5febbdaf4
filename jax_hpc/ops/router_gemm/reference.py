"""Truth of router_gemm: the float32 product with the sum of the weight's parts."""

import jax
import jax.numpy as jnp

from jax_hpc.ops.router_gemm.signature import Operands, Params, Results
from jax_hpc.ops.router_gemm.weights import RESIDUAL_SCALE


def router_gemm(operands: Operands, params: Params) -> Results:
    del params
    x = operands.x.astype(jnp.float32)
    parts = operands.weight.parts.astype(jnp.float32)
    # Every product of a bf16 pair is exact in float32; smallest part first, so that the sum of
    # the parts' products loses the least.
    logits = jnp.zeros((x.shape[0], parts.shape[1]), jnp.float32)
    for index in reversed(range(parts.shape[0])):
        product = jnp.einsum("th,eh->te", x, parts[index], precision=jax.lax.Precision.HIGHEST)
        logits = logits + product * RESIDUAL_SCALE**-index
    return Results(logits)
