"""Top-k routing: which experts a token visits, and with which weights."""

from jax_hpc.ops.route_topk.api import route_topk
from jax_hpc.ops.route_topk.signature import RouteResult

__all__ = ["RouteResult", "route_topk"]
