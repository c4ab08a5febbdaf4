"""The paged cache and its slot arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc.cache import PagedKVCache, pages_for, slots_of
from jax_hpc.rope import rope_table


def test_zeros_makes_separate_buffers() -> None:
    cache = PagedKVCache.zeros(num_layers=2, num_pages=3, num_kv_heads=2, page_size=16, head_dim=8)
    assert (cache.num_pages, cache.page_size, cache.dtype) == (3, 16, jnp.bfloat16)
    leaves = jax.tree.leaves(cache)
    assert [leaf.shape for leaf in leaves] == [(3, 2, 16, 8)] * 4
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == 4


def test_scale_pages_only_with_fp8() -> None:
    sizes = dict(num_layers=1, num_pages=3, num_kv_heads=2, head_dim=8, k_scales_per_token=True)
    cache = PagedKVCache.zeros(dtype=jnp.float8_e4m3fn, **sizes)
    scales = cache.layers[0].k_scale_pages
    assert scales is not None and scales.shape == (3, 2, 64) and scales.dtype == jnp.float32
    with pytest.raises(
        ValueError, match="'k_scales_per_token' must be False for a bfloat16 cache"
    ):
        PagedKVCache.zeros(**sizes)
    with pytest.raises(TypeError, match="'dtype' must be bfloat16 or float32 or float8_e4m3fn"):
        PagedKVCache.zeros(num_layers=1, num_pages=1, num_kv_heads=1, head_dim=8, dtype=jnp.int8)
    with pytest.raises(ValueError, match="'page_size' must be one of 16, 32, 64, 128, got 48"):
        PagedKVCache.zeros(num_layers=1, num_pages=1, num_kv_heads=1, head_dim=8, page_size=48)


def test_zeros_refuses_empty_shapes() -> None:
    sizes = dict(num_layers=1, num_pages=1, num_kv_heads=1, head_dim=4)
    for name, value in (("num_layers", 0), ("num_pages", -1), ("head_dim", 0)):
        with pytest.raises(ValueError, match=f"PagedKVCache.zeros: argument '{name}' must be >="):
            PagedKVCache.zeros(**(sizes | {name: value}))


def test_pages_for() -> None:
    assert [pages_for(n, 16) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_slots_of_every_kind_of_row() -> None:
    table = jnp.array([[5, 2, -1], [0, 7, 1]], jnp.int32)
    rows = jnp.array([0, 0, 0, 1, 1, 1, 1], jnp.int32)
    positions = jnp.array([0, 17, 32, 47, 48, -1, 16], jnp.int32)
    got = slots_of(table[rows], positions, 16)
    np.testing.assert_array_equal(got, [80, 33, -1, 31, -1, -1, 112])


def test_rope_table_is_accurate_at_far_positions() -> None:
    table = rope_table(200_001, 64, 1e6)
    assert table.shape == (200_001, 64) and table.dtype == np.float32
    position = 200_000
    angles = position * 1e6 ** (-np.arange(32, dtype=np.longdouble) / 32)
    want = np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float64)
    assert np.abs(table[position] - want).max() < 1e-7
    with pytest.raises(ValueError, match="'rotary_dim' must be even, got 7"):
        rope_table(4, 7, 1e4)
    with pytest.raises(ValueError, match="'theta' must be > 0, got 0.0"):
        rope_table(4, 8, 0.0)
