"""Routers of real models, shared by tests and benchmarks."""

import dataclasses

from jax_hpc.ops.route_topk import cases as route_topk
from jax_hpc.ops.router_gemm import cases as router_gemm


@dataclasses.dataclass(frozen=True)
class Case:
    """One router: its product and its choice of experts."""

    product: router_gemm.Case
    choice: route_topk.Case

    @property
    def name(self) -> str:
        return self.product.name


CASES = tuple(
    Case(product, choice)
    for product in router_gemm.CASES
    for choice in route_topk.CASES
    if product.name == choice.name
)
