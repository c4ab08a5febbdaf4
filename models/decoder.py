"""What the models share: pre-norm layers of paged attention and of dense or sparse feed-forward.

A model's own file reads its config.json into a `DecoderConfig` and names its tensors.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_hpc import fp8
from jax_hpc._checks import check
from jax_hpc.cache import DEFAULT_PAGE_SIZE, PagedKVCache
from jax_hpc.checkpoint_plan import Q_SCALES, ArraySpec, LoadItem
from jax_hpc.models import decoder_checkpoint
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
from jax_hpc.nn.linear import LinearFormat
from jax_hpc.nn.moe import ExpertFormat
from jax_hpc.rope import rope_table
from jax_hpc.step import StepInputs
from jax_hpc.types import Implementations


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches, named by meaning; a model's ``from_hf`` reads its config.json.

    sparse_layers: which layers have experts; the others have one MLP of
      ``dense_intermediate_size``. No expert size counts where there are none.
    scoring, renormalize, use_router_bias, router_scale: see :func:`jax_hpc.route_topk`.
    shared_intermediate_size: of the expert that every token takes; 0 for none.
    router_terms: parts that hold the router's weight (see ``split_router_weight``); None: one in
      a bf16 model, whose routers are bf16, three in a float32 one.
    float32_head: the head's weight is held in float32, whatever the model's dtype.
    linear_format: of attention's and the MLPs' products; expert_format: of the experts.
    block_rows: of ``fp8_block`` experts, 64 for shards that start inside a block.
    """

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
    scoring: str = "softmax"
    use_router_bias: bool = False
    router_scale: float = 1.0
    shared_intermediate_size: int = 0
    router_terms: int | None = None
    float32_head: bool = False
    linear_format: LinearFormat = "dense"
    expert_format: ExpertFormat = "dense"
    block_rows: int = fp8.BLOCK

    def __post_init__(self) -> None:
        name, heads = type(self).__name__, self.num_kv_heads
        q_heads = self.num_q_heads
        check(
            q_heads % heads == 0,
            name,
            "num_q_heads",
            expected=f"a multiple of num_kv_heads = {heads}",
            got=q_heads,
        )
        layers, listed = self.num_layers, len(self.sparse_layers)
        check(listed == layers, name, "sparse_layers", expected=f"{layers} values", got=listed)
        if any(self.sparse_layers):
            experts, chosen = self.num_experts, self.experts_per_token
            check(
                1 <= chosen <= experts,
                name,
                "experts_per_token",
                expected=f"from 1 to num_experts = {experts}",
                got=chosen,
            )


def common_settings(config: HFConfig) -> dict[str, Any]:
    """The settings that every family's config.json has under the same keys."""
    config.require("hidden_act", "silu")
    config.require("attention_bias", False)
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    return dict(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        num_layers=config.size("num_hidden_layers"),
        num_q_heads=heads,
        num_kv_heads=config.size("num_key_value_heads"),
        head_dim=config.size("head_dim", default=max(1, hidden // heads)),
        dense_intermediate_size=config.size("intermediate_size"),
        rms_eps=config.number("rms_norm_eps"),
        rope_theta=config.rope_theta(),
        max_positions=config.size("max_position_embeddings"),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        linear_format=config.linear_format(),
        expert_format=config.expert_format(),
    )


def _router_terms(config: DecoderConfig, dtype: jax.typing.DTypeLike) -> int:
    if config.router_terms is not None:
        return config.router_terms
    return 1 if jnp.dtype(dtype) == jnp.bfloat16 else 3


def _add_and_norm(norm: RMSNorm, x: jax.Array | None, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The norm of ``x + h``, and that sum; h alone before the first layer."""
    return (norm(h), h) if x is None else norm(x, h)


class SparseMLP(nnx.Module):
    """Router and experts of one layer, and the expert that every token takes, if there is one."""

    def __init__(
        self,
        config: DecoderConfig,
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
            terms=_router_terms(config, dtype),
            scoring=config.scoring,
            renormalize=config.renormalize,
            scale=config.router_scale,
            use_bias=config.use_router_bias,
            implementation=implementations.router,
        )
        self.experts = FusedMoE(
            config.hidden_size,
            config.num_experts,
            config.expert_intermediate_size,
            rngs=rngs,
            format=config.expert_format,
            block_rows=config.block_rows,
            dtype=dtype,
            implementation=implementations.moe,
        )
        self.shared_mlp = (
            GatedMLP(
                config.hidden_size,
                config.shared_intermediate_size,
                rngs=rngs,
                dtype=dtype,
                format=config.linear_format,
            )
            if config.shared_intermediate_size
            else None
        )

    def __call__(self, x: jax.Array, active: jax.Array) -> jax.Array:
        route = self.gate(x, active)
        shared = None if self.shared_mlp is None else self.shared_mlp(x)
        return self.experts(x, route.ids, route.weights, shared_output=shared)


class DecoderLayer(nnx.Module):
    """Pre-norm attention, then pre-norm experts (or one dense MLP)."""

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike,
        implementations: Implementations,
    ) -> None:
        norm: dict[str, Any] = dict(eps=config.rms_eps, dtype=dtype)
        form = implementations.norm
        self.input_layernorm = RMSNorm(config.hidden_size, implementation=form, **norm)
        self.self_attn = PagedAttention(
            config.hidden_size,
            config.num_q_heads,
            config.num_kv_heads,
            config.head_dim,
            rngs=rngs,
            window=config.window,
            linear_format=config.linear_format,
            implementation=implementations.attention,
            **norm,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, implementation=form, **norm)
        if config.sparse_layers[index]:
            self.mlp: SparseMLP | GatedMLP = SparseMLP(
                config, rngs=rngs, dtype=dtype, implementations=implementations
            )
        else:
            self.mlp = GatedMLP(
                config.hidden_size,
                config.dense_intermediate_size,
                rngs=rngs,
                dtype=dtype,
                format=config.linear_format,
            )

    def feed_forward(self, x: jax.Array, active: jax.Array) -> jax.Array:
        return self.mlp(x, active) if isinstance(self.mlp, SparseMLP) else self.mlp(x)


class Decoder(nnx.Module):
    """Decoder-only language model.

    ``hidden, cache = model(inputs, cache)`` runs one prefill or decode step;
    ``model.logits(hidden)`` projects the rows whose next token is wanted.
    """

    Config: type[DecoderConfig] = DecoderConfig
    names = decoder_checkpoint.Names()
    """The tensors of its checkpoints that families call differently."""

    def __init__(
        self,
        config: DecoderConfig,
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
        self.norm = RMSNorm(
            config.hidden_size,
            eps=config.rms_eps,
            dtype=dtype,
            implementation=implementations.norm,
        )
        head_dtype = jnp.float32 if config.float32_head else dtype
        self.lm_head = (
            None
            if config.tie_embeddings
            else Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=head_dtype)
        )
        self.cos_sin = nnx.Variable(
            jnp.asarray(rope_table(config.max_positions, config.head_dim, config.rope_theta))
        )

    def __call__(self, inputs: StepInputs, cache: PagedKVCache) -> tuple[jax.Array, PagedKVCache]:
        """Run the layers over one step's rows: -> hidden ``[T, H]`` after the final norm."""
        count, found = len(self.layers), len(cache.layers)
        name = type(self).__name__
        check(found == count, name, "cache", expected=f"of {count} layers", got=found)
        if not inputs.is_prefill:
            schedule = self.layers[0].self_attn.schedule(inputs, cache.layers[0])
            inputs = dataclasses.replace(inputs, schedule=schedule)
        h, x = self.embed_tokens(inputs.tokens), None
        pages = list(cache.layers)
        # h is what the layers have added up, but for x, the last one's result: the next norm adds
        # that first.
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layers/{index}"):
                y, h = _add_and_norm(layer.input_layernorm, x, h)
                y, pages[index] = layer.self_attn(y, inputs, pages[index], self.cos_sin[...])
                y, h = layer.post_attention_layernorm(y, h)
                x = layer.feed_forward(y, inputs.active)
        return _add_and_norm(self.norm, x, h)[0], PagedKVCache(tuple(pages))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden ``[R, H]`` -> float32 ``[R, V]``, accumulated and never rounded below float32."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        weight = head.weight[...]
        # A float32 head takes a bf16 hidden state as float32; else both have the model's dtype.
        return project(hidden.astype(weight.dtype), weight, out_dtype=jnp.float32)

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

    def checkpoint_plan(
        self, stored: Mapping[str, ArraySpec], *, quantize: bool = False
    ) -> list[LoadItem]:
        """Which checkpoint tensor fills which parameter.

        Args:
          stored: the checkpoint's tensors; some, such as scales of the KV cache, are optional.
          quantize: fp8 experts are made from wider ones.
        """
        terms = _router_terms(self.config, self.dtype)
        return decoder_checkpoint.plan(self.config, self.names, terms, stored, quantize)

    @property
    def checkpoint_ignored(self) -> tuple[str, ...]:
        """Patterns of tensors that the model does not use: the layers after its last one, which
        draft tokens, and static scales of q, which is quantised by its own largest values."""
        end = self.config.num_layers
        drafts = tuple(f"model.layers.{end + i}.*" for i in range(self.names.draft_layers))
        return (*drafts, *Q_SCALES)

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
        chosen = config.experts_per_token / max(1, config.num_experts)
        head = sizes["embed_tokens"] if self.lm_head is None else 0
        kv_heads = config.num_layers * batch * kv_len * config.num_kv_heads
        head_bytes = 2 * config.head_dim * kv_itemsize + 4 * k_scales_per_token
        experts = round(sizes["experts"] * (1 - (1 - chosen) ** batch))
        return sizes["rest"] + head + experts + kv_heads * head_bytes
