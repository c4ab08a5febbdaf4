"""Programs lowered for a GPU, on any machine."""

from typing import Any

import jax.numpy as jnp

from jax_hpc.decode import DecodeState, make_decode_loop, params_of
from tests.support import tiny_models


def decode_loop_text(cache_dtype: Any, layers: int) -> str:
    """A decode loop of four steps of a tiny Qwen3-MoE, two sequences, D 64, pages of 16."""
    model = tiny_models.qwen3_moe(
        jnp.bfloat16, num_layers=layers, sparse_layers=(True,) * layers, head_dim=64
    )
    state = DecodeState.create(jnp.zeros((2, 4), jnp.int32), jnp.full(2, 64, jnp.int32))
    cache = model.new_cache(8, 16, cache_dtype)
    traced = make_decode_loop(model, 4).trace(params_of(model), cache, state)
    return traced.lower(lowering_platforms=("cuda",)).as_text()
