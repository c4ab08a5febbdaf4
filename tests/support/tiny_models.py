"""Small random models for tests of modules and loops."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jax_hpc.models import Qwen3MoE, Qwen3MoEConfig


def qwen3_moe(dtype: Any = jnp.float32, seed: int = 0, **changes: Any) -> Qwen3MoE:
    """Two layers, G 2, eight experts, one of the layers dense when asked for."""
    settings: dict[str, Any] = dict(
        vocab_size=96,
        hidden_size=64,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_experts=8,
        experts_per_token=2,
        expert_intermediate_size=32,
        dense_intermediate_size=64,
        sparse_layers=(True, True),
        renormalize=True,
        rms_eps=1e-6,
        rope_theta=1e4,
        max_positions=256,
        tie_embeddings=False,
    )
    config = Qwen3MoEConfig(**(settings | changes))
    return Qwen3MoE(config, rngs=nnx.Rngs(seed), dtype=dtype)
