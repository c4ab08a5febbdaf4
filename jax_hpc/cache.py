"""The paged KV cache and the arithmetic of its page tables.

A cache holds, per layer, ``k_pages`` and ``v_pages [P, Hkv, N, D]``. Token ``t`` of a sequence
lives in page ``page_table[t // N]``, row ``t % N``; its *slot* is ``page * N + row``. Which pages
belong to which sequence is the caller's business (see :class:`jax_hpc.decode.DecodeState`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_hpc import fp8
from jax_hpc._checks import check, check_choice, check_dtype

PAGE_SIZES = (16, 32, 64, 128)
DEFAULT_PAGE_SIZE = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerPages:
    """One layer's part of a cache.

    k_pages, v_pages: ``[P, Hkv, N, D]`` bf16, float32 or float8_e4m3fn.
    k_scale_pages: float32 ``[P, Hkv, N]``, the scales of an fp8 K per token and head, or None.
    """

    k_pages: jax.Array
    v_pages: jax.Array
    k_scale_pages: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """The pages of all layers. Donate it to every jitted function that returns it.

    Layers are separate arrays: one stacked array would be copied a layer at a time wherever a
    layer is sliced out of it.
    """

    layers: tuple[LayerPages, ...]

    @classmethod
    def zeros(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int = DEFAULT_PAGE_SIZE,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        k_scales_per_token: bool = False,
    ) -> "PagedKVCache":
        """A cache of zeros, every array a buffer of its own.

        Call it outside jit: inside, XLA merges equal constants, and donated buffers that are
        shared have to be copied.

        Args:
          dtype: bf16, float32 or float8_e4m3fn.
          k_scales_per_token: also hold dynamic K scales (fp8 only).
        """
        operator = "PagedKVCache.zeros"
        check_choice(operator, "page_size", page_size, PAGE_SIZES)
        sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            check(size >= 1, operator, name, expected=">= 1", got=size)
        check(num_pages >= 0, operator, "num_pages", expected=">= 0", got=num_pages)
        dtype = jnp.dtype(dtype)
        struct = jax.ShapeDtypeStruct((), dtype)
        check_dtype(operator, "dtype", struct, (jnp.bfloat16, jnp.float32, fp8.E4M3))
        check(
            not k_scales_per_token or dtype == fp8.E4M3,
            operator,
            "k_scales_per_token",
            expected=f"False for a {dtype.name} cache",
            got=True,
        )
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        return cls(
            tuple(
                LayerPages(
                    jnp.zeros(shape, dtype),
                    jnp.zeros(shape, dtype),
                    jnp.ones(shape[:3], jnp.float32) if k_scales_per_token else None,
                )
                for _ in range(num_layers)
            )
        )

    @property
    def num_pages(self) -> int:
        return self.layers[0].k_pages.shape[0]

    @property
    def page_size(self) -> int:
        return self.layers[0].k_pages.shape[2]

    @property
    def dtype(self) -> jnp.dtype:
        return self.layers[0].k_pages.dtype


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that ``num_tokens`` tokens need (host arithmetic)."""
    return -(-num_tokens // page_size)


def slots_of(page_table: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """Slots of one token per row of a page table.

    Args:
      page_table: int32 ``[R, M]``.
      positions: int32 ``[R]``.

    Returns:
      int32 ``[R]``; -1 (skipped by every operator) where the position is negative or beyond the
      table, or its page is unassigned (negative).
    """
    width = page_table.shape[1]
    index = positions // page_size
    inside = (positions >= 0) & (index < width)
    page = jnp.take_along_axis(page_table, jnp.clip(index, 0, width - 1)[:, None], axis=1)[:, 0]
    slot = page * page_size + positions % page_size
    return jnp.where(inside & (page >= 0), slot, -1)
