"""Qwen3-MoE: grouped-query attention with QK norm, and experts behind a softmax router.

Sources: the Qwen3 technical report (arXiv 2505.09388) and the published checkpoints' configs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_hpc._checks import check
from jax_hpc.cache import DEFAULT_PAGE_SIZE, PagedKVCache
from jax_hpc.checkpoint_plan import LoadItem
from jax_hpc.models import qwen3_moe_checkpoint
from jax_hpc.models.hf_config import HFConfig
from jax_hpc.nn import (
    Embedding,
    FusedMoE,
    GatedMLP,
    Linear,
    PagedAttention,
    RMSNorm,
    SplitRouter,
    project,
)
from jax_hpc.nn.moe import ExpertFormat
from jax_hpc.rope import rope_table
from jax_hpc.step import StepInputs
from jax_hpc.types import Implementations


@dataclasses.dataclass(frozen=True)
class Qwen3MoEConfig:
    """Sizes and switches, named by meaning; ``from_hf`` reads a checkpoint's config.json."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    dense_intermediate_size: int
    sparse_layers: tuple[bool, ...]
    renormalize: bool
    rms_eps: float
    rope_theta: float
    max_positions: int
    tie_embeddings: bool
    window: int | None = None
    expert_format: ExpertFormat = "dense"

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "Qwen3MoEConfig":
        """From the parsed config.json of a checkpoint.

        Raises:
          ValueError: a key is missing. NotImplementedError: a feature that no published
            Qwen3-MoE checkpoint uses and this model does not have; both name the key.
        """
        config = HFConfig("Qwen3-MoE", hf)
        config.require("hidden_act", "silu")
        config.require("attention_bias", False)
        layers, step = config["num_hidden_layers"], config.get("decoder_sparse_step", 1)
        dense = set(config.get("mlp_only_layers", None) or ())
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            num_layers=layers,
            num_q_heads=heads,
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim", None) or hidden // heads,
            num_experts=config.first_of("num_experts", "num_local_experts"),
            experts_per_token=config["num_experts_per_tok"],
            expert_intermediate_size=config["moe_intermediate_size"],
            dense_intermediate_size=config["intermediate_size"],
            sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
            renormalize=config.get("norm_topk_prob", False),
            rms_eps=config["rms_norm_eps"],
            rope_theta=config.rope_theta(),
            max_positions=config["max_position_embeddings"],
            tie_embeddings=config.get("tie_word_embeddings", False),
            window=config["sliding_window"] if config.get("use_sliding_window", False) else None,
            expert_format=config.expert_format(),
        )


def _router_terms(dtype: jax.typing.DTypeLike) -> int:
    """A bf16 router is exact in one part; a model run in float32 keeps float32 accuracy."""
    return 1 if jnp.dtype(dtype) == jnp.bfloat16 else 3


class SparseMLP(nnx.Module):
    """Router and experts of one layer."""

    def __init__(
        self,
        config: Qwen3MoEConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike,
        implementations: Implementations,
    ) -> None:
        self.gate = SplitRouter(
            config.hidden_size,
            config.num_experts,
            config.experts_per_token,
            rngs=rngs,
            terms=_router_terms(dtype),
            renormalize=config.renormalize,
            implementation=implementations.router,
        )
        self.experts = FusedMoE(
            config.hidden_size,
            config.num_experts,
            config.expert_intermediate_size,
            rngs=rngs,
            format=config.expert_format,
            dtype=dtype,
            implementation=implementations.moe,
        )

    def __call__(self, x: jax.Array, active: jax.Array) -> jax.Array:
        route = self.gate(x, active)
        return self.experts(x, route.ids, route.weights)


class DecoderLayer(nnx.Module):
    """Pre-norm attention, then pre-norm experts (or one dense MLP)."""

    def __init__(
        self,
        config: Qwen3MoEConfig,
        index: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike,
        implementations: Implementations,
    ) -> None:
        norm: dict[str, Any] = dict(eps=config.rms_eps, dtype=dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.self_attn = PagedAttention(
            config.hidden_size,
            config.num_q_heads,
            config.num_kv_heads,
            config.head_dim,
            rngs=rngs,
            window=config.window,
            implementation=implementations.attention,
            **norm,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        if config.sparse_layers[index]:
            self.mlp: SparseMLP | GatedMLP = SparseMLP(
                config, rngs=rngs, dtype=dtype, implementations=implementations
            )
        else:
            self.mlp = GatedMLP(
                config.hidden_size, config.dense_intermediate_size, rngs=rngs, dtype=dtype
            )

    def feed_forward(self, x: jax.Array, active: jax.Array) -> jax.Array:
        return self.mlp(x, active) if isinstance(self.mlp, SparseMLP) else self.mlp(x)


class Qwen3MoE(nnx.Module):
    """Decoder-only Qwen3-MoE language model.

    ``hidden, cache = model(inputs, cache)`` runs one prefill or decode step;
    ``model.logits(hidden)`` projects the rows whose next token is wanted.
    """

    Config = Qwen3MoEConfig

    def __init__(
        self,
        config: Qwen3MoEConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        implementations: Implementations | None = None,
    ) -> None:
        implementations = implementations or Implementations()
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, rngs=rngs, dtype=dtype
        )
        self.layers = nnx.List(
            DecoderLayer(config, i, rngs=rngs, dtype=dtype, implementations=implementations)
            for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_embeddings
            else Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)
        )
        self.cos_sin = nnx.Variable(
            jnp.asarray(rope_table(config.max_positions, config.head_dim, config.rope_theta))
        )

    def __call__(self, inputs: StepInputs, cache: PagedKVCache) -> tuple[jax.Array, PagedKVCache]:
        """Run the layers over one step's rows: -> hidden ``[T, H]`` after the final norm."""
        count, found = len(self.layers), len(cache.layers)
        check(found == count, "Qwen3MoE", "cache", expected=f"of {count} layers", got=found)
        if not inputs.is_prefill:
            schedule = self.layers[0].self_attn.schedule(inputs, cache.layers[0])
            inputs = dataclasses.replace(inputs, schedule=schedule)
        x = self.embed_tokens(inputs.tokens)
        pages = list(cache.layers)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layers/{index}"):
                y, pages[index] = layer.self_attn(
                    layer.input_layernorm(x), inputs, pages[index], self.cos_sin[...]
                )
                x = x + y
                x = x + layer.feed_forward(layer.post_attention_layernorm(x), inputs.active)
        return self.norm(x), PagedKVCache(tuple(pages))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden ``[R, H]`` -> float32 ``[R, V]``."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return project(hidden, head.weight[...], out_dtype=jnp.float32)

    def new_cache(
        self,
        num_pages: int,
        page_size: int = DEFAULT_PAGE_SIZE,
        dtype: jax.typing.DTypeLike | None = None,
        *,
        k_scales_per_token: bool = False,
    ) -> PagedKVCache:
        """A cache of zeros in this model's shapes; dtype defaults to the model's.

        With ``k_scales_per_token`` an fp8 K is quantised with a scale per token and head.
        """
        return PagedKVCache.zeros(
            num_layers=self.config.num_layers,
            num_pages=num_pages,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            page_size=page_size,
            dtype=dtype or self.dtype,
            k_scales_per_token=k_scales_per_token,
        )

    def checkpoint_plan(self) -> list[LoadItem]:
        """Which checkpoint tensor fills which parameter."""
        terms = _router_terms(self.dtype)
        return qwen3_moe_checkpoint.plan(self.config, terms)

    def bytes_per_step(
        self, batch: int, kv_len: int, kv_itemsize: int, k_scales_per_token: bool = False
    ) -> int:
        """Bytes that one decode step must read: weights in use, and K and V of every sequence.

        Experts are counted as expected under uniform routing of ``batch`` tokens.
        """
        _, state = nnx.split(self)
        sizes = {"experts": 0, "embed_tokens": 0, "cos_sin": 0, "rest": 0}
        for path, leaf in nnx.to_flat_state(state):
            kind = next((name for name in sizes if name in path), "rest")
            sizes[kind] += leaf[...].nbytes
        config = self.config
        untouched = (1 - config.experts_per_token / config.num_experts) ** batch
        head = sizes["embed_tokens"] if self.lm_head is None else 0
        kv_heads = config.num_layers * batch * kv_len * config.num_kv_heads
        head_bytes = 2 * config.head_dim * kv_itemsize + 4 * k_scales_per_token
        experts = round(sizes["experts"] * (1 - untouched))
        return sizes["rest"] + head + experts + kv_heads * head_bytes
