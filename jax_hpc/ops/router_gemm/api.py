"""Public function of router_gemm."""

import jax

from jax_hpc._checks import Dims
from jax_hpc.ops.router_gemm.checks import check_operands
from jax_hpc.ops.router_gemm.primitive import OPERATOR
from jax_hpc.ops.router_gemm.signature import Operands, Params
from jax_hpc.ops.router_gemm.weights import SplitWeight
from jax_hpc.types import Implementation


def router_gemm(
    x: jax.Array, weight: SplitWeight, *, implementation: Implementation = "auto"
) -> jax.Array:
    """Router logits ``x @ W.T`` with float32-class accuracy from bf16 activations.

    Which experts a token visits hangs on small differences between logits, so they are formed
    and returned in float32, from a weight that :func:`split_router_weight` split into bf16
    parts (Hy3 and LongCat-Flash keep their router weights in float32).

    Args:
      x: ``[T, H]`` bf16 or float32. float32 has no kernel.
      weight: :class:`SplitWeight` of ``[E, H]``.
      implementation: see :data:`jax_hpc.types.Implementation`.

    Returns:
      ``[T, E]`` float32. Against float64, per element: ``|error| <= 2^-16 * sum |x||W|`` with
      two terms, ``2^-21`` with three (the kernel: H up to 49152).

    Raises:
      ValueError: shapes do not fit.
      TypeError: a dtype is not supported, or weight is not a SplitWeight.
      NotImplementedError: ``implementation="cuda"`` and no kernel takes the case.
    """
    operator = "router_gemm"
    check_operands(operator, x, weight, Dims(operator))
    return OPERATOR(Operands(x, weight), Params(), implementation=implementation).logits
