"""Truth of router_topk: router_gemm, then route_topk on its logits."""

from jax_hpc.ops.route_topk import reference as route_topk
from jax_hpc.ops.route_topk.signature import Operands as Choice
from jax_hpc.ops.route_topk.signature import RouteResult
from jax_hpc.ops.router_gemm import reference as router_gemm
from jax_hpc.ops.router_gemm.signature import Params as ProductParams
from jax_hpc.ops.router_topk.signature import Operands, Params, product


def router_topk(operands: Operands, params: Params) -> RouteResult:
    logits = router_gemm.router_gemm(product(operands), ProductParams()).logits
    return route_topk.route_topk(Choice(logits, operands.bias), params.route)
