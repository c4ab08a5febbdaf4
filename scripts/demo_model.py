"""Qwen3-MoE in plain JAX, to train the demo checkpoint and write it in Hugging Face form.

Independent of the package on purpose: the checkpoint must not depend on the code that it tests.
Semantics are those of transformers' Qwen3MoeForCausalLM. Letters: B batch, S positions, H hidden,
D head dim, E experts, I expert intermediate size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors.numpy import save_file

Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """The shape of the model; the defaults are the demo checkpoint's."""

    vocab: int = 2048
    hidden: int = 128
    layers: int = 4
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 16
    top_k: int = 4
    intermediate: int = 64
    context: int = 2048
    rope_theta: float = 10000.0
    eps: float = 1e-6


def init_params(config: Config, key: Array) -> Params:
    """Random float32 parameters; attention weights are [in, out], all others [out, in]."""
    c = config
    keys = iter(jax.random.split(key, 2 + 8 * c.layers))

    def normal(*shape: int, std: float) -> Array:
        return std * jax.random.normal(next(keys), shape, jnp.float32)

    fan_in, residual = c.hidden**-0.5, (2 * c.layers) ** -0.5
    layers = [
        {
            "input_norm": jnp.ones(c.hidden),
            "post_norm": jnp.ones(c.hidden),
            "q_norm": jnp.ones(c.head_dim),
            "k_norm": jnp.ones(c.head_dim),
            "q": normal(c.hidden, c.q_heads * c.head_dim, std=fan_in),
            "k": normal(c.hidden, c.kv_heads * c.head_dim, std=fan_in),
            "v": normal(c.hidden, c.kv_heads * c.head_dim, std=fan_in),
            "o": normal(c.q_heads * c.head_dim, c.hidden, std=fan_in * residual),
            "router": normal(c.experts, c.hidden, std=0.02),
            "gate": normal(c.experts, c.intermediate, c.hidden, std=fan_in),
            "up": normal(c.experts, c.intermediate, c.hidden, std=fan_in),
            "down": normal(c.experts, c.hidden, c.intermediate, std=fan_in * residual),
        }
        for _ in range(c.layers)
    ]
    return {
        "embed": normal(c.vocab, c.hidden, std=fan_in),
        "layers": layers,
        "norm": jnp.ones(c.hidden),
        "head": normal(c.vocab, c.hidden, std=0.5 * fan_in),
    }


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis, in float32."""
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (weight * y).astype(x.dtype)


def rope(x: Array, theta: float) -> Array:
    """Half-split rotary embedding of x [B, S, heads, D] at positions 0..S-1."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)


def attention(p: Params, x: Array, config: Config) -> Array:
    """Causal grouped-query attention with per-head norms of q and k before the rotation."""
    c = config
    b, s, _ = x.shape
    q = (x @ p["q"].astype(x.dtype)).reshape(b, s, c.q_heads, c.head_dim)
    k = (x @ p["k"].astype(x.dtype)).reshape(b, s, c.kv_heads, c.head_dim)
    v = (x @ p["v"].astype(x.dtype)).reshape(b, s, c.kv_heads, c.head_dim)
    q = rope(rms_norm(q, p["q_norm"], c.eps), c.rope_theta)
    k = rope(rms_norm(k, p["k_norm"], c.eps), c.rope_theta)
    q = q.reshape(b, s, c.kv_heads, c.q_heads // c.kv_heads, c.head_dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k).astype(jnp.float32)
    causal = jnp.tril(jnp.ones((s, s), bool))
    scores = jnp.where(causal, scores * c.head_dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(b, s, -1)
    return out @ p["o"].astype(x.dtype)


def moe(p: Params, x: Array, config: Config) -> tuple[Array, Array]:
    """Top-k experts, each computed for every token, and the load-balancing loss of the layer.

    The loss is E * sum over experts of (share of the choices) * (mean probability); 1 is balanced,
    counted so that a token's k choices together weigh 1.
    """
    c = config
    logits = x.astype(jnp.float32) @ p["router"].T
    probabilities = jax.nn.softmax(logits, axis=-1)
    best, ids = jax.lax.top_k(probabilities, c.top_k)
    chosen = jax.nn.one_hot(ids, c.experts, dtype=jnp.float32)
    weights = jnp.einsum("bsk,bske->bse", best / best.sum(-1, keepdims=True), chosen)
    gate = jnp.einsum("bsh,eih->bsei", x, p["gate"].astype(x.dtype))
    up = jnp.einsum("bsh,eih->bsei", x, p["up"].astype(x.dtype))
    inner = jax.nn.silu(gate) * up * weights[..., None].astype(x.dtype)
    out = jnp.einsum("bsei,ehi->bsh", inner, p["down"].astype(x.dtype))
    share = chosen.mean(axis=(0, 1, 2))
    return out, c.experts * jnp.sum(share * probabilities.mean(axis=(0, 1)))


def _drop(x: Array, rate: float, key: Array | None) -> Array:
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def forward(
    params: Params,
    tokens: Array,
    config: Config,
    *,
    dtype: Any = jnp.float32,
    dropout: float = 0.0,
    key: Array | None = None,
) -> tuple[Array, Array]:
    """tokens int32 [B, S] -> (float32 logits [B, S, V], mean load-balancing loss)."""
    drops = 2 * config.layers
    keys = [None] * drops if key is None else jax.random.split(key, drops)
    x = params["embed"][tokens].astype(dtype)
    balance = jnp.float32(0)
    for index, p in enumerate(params["layers"]):
        y = attention(p, rms_norm(x, p["input_norm"], config.eps), config)
        x = x + _drop(y, dropout, keys[2 * index])
        y, loss = moe(p, rms_norm(x, p["post_norm"], config.eps), config)
        x = x + _drop(y, dropout, keys[2 * index + 1])
        balance += loss / config.layers
    x = rms_norm(x, params["norm"], config.eps)
    head = params["head"].astype(dtype)
    return jnp.einsum("bsh,vh->bsv", x, head, preferred_element_type=jnp.float32), balance


def to_bfloat16(params: Params) -> Params:
    """What the checkpoint will hold."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def hf_tensors(params: Params) -> dict[str, np.ndarray]:
    """Parameters under the names and in the layout of Hugging Face's Qwen3MoeForCausalLM."""
    tensors = {"model.embed_tokens.weight": params["embed"]}
    for index, p in enumerate(params["layers"]):
        prefix = f"model.layers.{index}."
        for name in "qkvo":
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = p[name].T
        tensors[f"{prefix}self_attn.q_norm.weight"] = p["q_norm"]
        tensors[f"{prefix}self_attn.k_norm.weight"] = p["k_norm"]
        tensors[f"{prefix}input_layernorm.weight"] = p["input_norm"]
        tensors[f"{prefix}post_attention_layernorm.weight"] = p["post_norm"]
        tensors[f"{prefix}mlp.gate.weight"] = p["router"]
        for expert in range(p["gate"].shape[0]):
            for name in ("gate", "up", "down"):
                tensors[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = p[name][expert]
    tensors["model.norm.weight"] = params["norm"]
    tensors["lm_head.weight"] = params["head"]
    return {name: np.ascontiguousarray(np.asarray(value)) for name, value in tensors.items()}


def save_shards(tensors: Mapping[str, np.ndarray], out: Path, shards: int = 2) -> None:
    """Writes model-0000i-of-0000n.safetensors of about equal size and their index."""
    total = sum(value.nbytes for value in tensors.values())
    parts: list[dict[str, np.ndarray]] = [{} for _ in range(shards)]
    done = 0
    for name, value in tensors.items():
        parts[min(done * shards // total, shards - 1)][name] = value
        done += value.nbytes
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file_name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(part, out / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def save_config(config: Config, out: Path, end_id: int, pad_id: int) -> None:
    """Writes config.json with the keys of the published Qwen3-MoE checkpoints."""
    c = config
    content = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": pad_id,
        "decoder_sparse_step": 1,
        "eos_token_id": end_id,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate * c.top_k,
        "max_position_embeddings": c.context,
        "max_window_layers": c.layers,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": c.intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": c.q_heads,
        "num_experts": c.experts,
        "num_experts_per_tok": c.top_k,
        "num_hidden_layers": c.layers,
        "num_key_value_heads": c.kv_heads,
        "output_router_logits": False,
        "rms_norm_eps": c.eps,
        "rope_scaling": None,
        "rope_theta": c.rope_theta,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": c.vocab,
    }
    (out / "config.json").write_text(json.dumps(content, indent=2) + "\n")
