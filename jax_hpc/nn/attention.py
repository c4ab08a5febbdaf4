"""Grouped-query attention over a paged KV cache."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_hpc import fp8
from jax_hpc.cache import LayerPages
from jax_hpc.nn.linear import Linear, LinearFormat
from jax_hpc.ops.decode_attention import DecodeSchedule, decode_attention, decode_schedule
from jax_hpc.ops.prefill_attention import prefill_attention
from jax_hpc.ops.qk_norm_rope_append import qk_norm_rope_append
from jax_hpc.step import StepInputs
from jax_hpc.types import Implementation


class PagedAttention(nnx.Module):
    """QKV projection, QK norm and RoPE, append to the cache, attention, output projection.

    qkv_proj: Linear H -> (Hq + 2 Hkv) D, rows q, k, v (rank by rank when split over a mesh axis).
    o_proj: Linear Hq D -> H. q_norm, k_norm: ``[D]`` or None. sinks: float32 ``[Hq]`` or None.
    k_scale, v_scale: float32 ``[]``, the static scales of an fp8 cache; 1.0 unless a checkpoint
    has them. An fp8 cache with scale pages takes dynamic K scales instead.

    Decode or prefill is chosen by the step: :attr:`StepInputs.is_prefill`.

    Args:
      norm: where the per-head RMSNorm of q and k stands: "before" RoPE, "after", or None.
      rope_style: "half" or "interleaved".
      window: a query sees the last ``window`` keys, itself included; None for all.
      use_sinks: learned logits that join each softmax's denominator.
      logit_cap: ``cap * tanh(logit / cap)``. scale: softmax scale, D^-0.5 by default.
      linear_format: of qkv_proj and o_proj, see :class:`Linear`.
      reduce_axis: mesh axis over which the heads are split inside ``jax.shard_map``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rngs: nnx.Rngs,
        norm: str | None = "before",
        eps: float = 1e-6,
        rope_style: str = "half",
        window: int | None = None,
        use_sinks: bool = False,
        logit_cap: float | None = None,
        scale: float | None = None,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        linear_format: LinearFormat = "dense",
        reduce_axis: str | None = None,
        implementation: Implementation = "auto",
    ) -> None:
        width = (num_q_heads + 2 * num_kv_heads) * head_dim
        options: dict[str, Any] = {"rngs": rngs, "dtype": dtype, "format": linear_format}
        self.qkv_proj = Linear(hidden_size, width, **options)
        self.o_proj = Linear(
            num_q_heads * head_dim, hidden_size, reduce_axis=reduce_axis, **options
        )
        has_norm = norm is not None
        self.q_norm = nnx.Param(jnp.ones((head_dim,), dtype)) if has_norm else None
        self.k_norm = nnx.Param(jnp.ones((head_dim,), dtype)) if has_norm else None
        self.sinks = nnx.Param(jnp.zeros((num_q_heads,), jnp.float32)) if use_sinks else None
        self.k_scale = nnx.Param(jnp.ones((), jnp.float32))
        self.v_scale = nnx.Param(jnp.ones((), jnp.float32))
        self.norm = norm
        self.eps = eps
        self.rope_style = rope_style
        self.window = window
        self.logit_cap = logit_cap
        self.scale = scale
        self.implementation: Implementation = implementation

    def schedule(self, inputs: StepInputs, pages: LayerPages) -> DecodeSchedule:
        """The work split of a decode step; layers of equal heads and window share one."""
        _, num_kv_heads, page_size, head_dim = pages.k_pages.shape
        width = self.o_proj.weight.shape[1]
        return decode_schedule(
            inputs.kv_lens,
            num_q_heads=width // head_dim,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            kv_dtype=pages.k_pages.dtype,
            page_size=page_size,
            q_len=inputs.tokens.shape[0] // inputs.kv_lens.shape[0],
            window=self.window,
            implementation=self.implementation,
        )

    def __call__(
        self, x: jax.Array, inputs: StepInputs, pages: LayerPages, cos_sin: jax.Array
    ) -> tuple[jax.Array, LayerPages]:
        """One layer of attention.

        Args:
          x: ``[T, H]``. pages: this layer's part of the cache.
          cos_sin: float32 ``[positions, rotary]``, see :func:`jax_hpc.rope_table`.

        Returns:
          ``[T, H]`` of x's dtype, and the pages with this step's K and V.
        """
        static = self._static_scales(pages)
        q, q_scale, k_pages, v_pages, k_scale_pages = qk_norm_rope_append(
            self.qkv_proj(x),
            _value(self.q_norm),
            _value(self.k_norm),
            cos_sin,
            inputs.positions,
            inputs.slots,
            pages.k_pages,
            pages.v_pages,
            **static,
            k_scale_pages=pages.k_scale_pages,
            eps=self.eps,
            norm=self.norm,
            rope_style=self.rope_style,
            quantize_q=pages.k_pages.dtype == fp8.E4M3,
            implementation=self.implementation,
        )
        pages = LayerPages(k_pages, v_pages, k_scale_pages)
        if k_scale_pages is not None:
            static["k_scale"] = k_scale_pages
        y = self._attend(q, q_scale, inputs, pages, static).astype(x.dtype)
        return self.o_proj(y.reshape(x.shape[0], -1)), pages

    def _static_scales(self, pages: LayerPages) -> dict[str, Any]:
        if pages.k_pages.dtype != fp8.E4M3:
            return {}
        dynamic = pages.k_scale_pages is not None
        return {"v_scale": self.v_scale[...]} | ({} if dynamic else {"k_scale": self.k_scale[...]})

    def _attend(
        self,
        q: jax.Array,
        q_scale: jax.Array | None,
        inputs: StepInputs,
        pages: LayerPages,
        scales: dict[str, Any],
    ) -> jax.Array:
        options: dict[str, Any] = dict(
            scale=self.scale,
            window=self.window,
            sinks=_value(self.sinks),
            logit_cap=self.logit_cap,
            implementation=self.implementation,
            **scales,
        )
        if inputs.q_starts is not None and inputs.q_lens is not None:
            return prefill_attention(
                q,
                pages.k_pages,
                pages.v_pages,
                inputs.page_table,
                inputs.q_starts,
                inputs.q_lens,
                inputs.kv_lens,
                max_q_len=inputs.max_q_len,
                q_scale=q_scale,
                **options,
            )
        batch = inputs.kv_lens.shape[0]
        by_sequence = (batch, q.shape[0] // batch, q.shape[1])
        return decode_attention(
            q.reshape(*by_sequence, q.shape[2]),
            pages.k_pages,
            pages.v_pages,
            inputs.page_table,
            inputs.kv_lens,
            inputs.schedule,
            q_scale=None if q_scale is None else q_scale.reshape(by_sequence),
            **options,
        )


def _value(param: Any) -> jax.Array | None:
    return None if param is None else param[...]
