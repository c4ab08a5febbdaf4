"""The whole router: logits from activations, then the experts of each token, in one call."""

from jax_hpc.ops.router_topk.api import router_topk

__all__ = ["router_topk"]
