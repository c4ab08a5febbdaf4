"""The decode_attention kernel on very long and on very many sequences, against float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import fp8
from jax_hpc.ops.decode_attention import decode_attention
from tests.support.attention_bounds import LSE_ERROR, SUM_ERROR
from tests.support.attention_truth import BF16, E4M3, Problem, make_problem
from tests.support.numerics import assert_bitwise, assert_close, cosine

pytestmark = pytest.mark.gpu

LONG = [700, 131072, 3, 64, 4000]
MIXED = [1, 5000, 6, 7, 64, 65, 777, 2048]
MANY = [1 + 37 * i % 901 for i in range(300)]
# name: (cache dtype, S, G, Hkv, D, lengths).
CASES: dict[str, tuple[Any, int, int, int, int, list[int]]] = {
    "bf16-long": (BF16, 1, 8, 2, 128, LONG),
    "bf16-long-drafts-7": (BF16, 7, 8, 1, 128, LONG),
    "bf16-drafts-6": (BF16, 6, 5, 2, 64, MIXED),
    "bf16-many": (BF16, 1, 8, 2, 128, MANY),
    "bf16-many-drafts-6": (BF16, 6, 4, 1, 64, MANY),
    "fp8-long": (E4M3, 1, 8, 2, 128, LONG),
    "fp8-long-drafts-6": (E4M3, 6, 8, 1, 128, LONG),
    "fp8-group-1-drafts-7": (E4M3, 7, 1, 3, 64, MIXED),
    "fp8-group-5-drafts-6": (E4M3, 6, 5, 2, 128, MIXED),
    "fp8-group-7": (E4M3, 1, 7, 2, 64, MIXED),
    "fp8-group-12-drafts-7": (E4M3, 7, 12, 1, 128, MIXED),
    "fp8-many": (E4M3, 1, 8, 2, 128, MANY),
}
PAGE_SIZE = 64


def draw(name: str, rng: np.random.Generator) -> tuple[Problem, np.ndarray, np.ndarray]:
    """A cache, q, and the values that q has for the kernel."""
    dtype, q_len, group, kv_heads, dim, lens = CASES[name]
    problem = make_problem(
        rng,
        lens,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=PAGE_SIZE,
        width=-(-max(lens) // PAGE_SIZE) + 1,
        dtype=dtype,
    )
    q = rng.normal(0, 2, (len(lens), q_len, group * kv_heads, dim)).astype(BF16)
    if dtype == BF16:
        return problem, q, q.astype(np.float64)
    problem.options = {"k_scale": 0.5, "v_scale": rng.uniform(0.5, 2, kv_heads)}
    scale = fp8.amax_scale(jnp.asarray(q), axis=-1)
    quantized = np.asarray(fp8.quantize(jnp.asarray(q), scale[..., None]))
    return problem, q, quantized.astype(np.float64) * np.asarray(scale)[..., None]


@functools.cache
def public(num_splits: Any) -> Any:
    options: dict[str, Any] = dict(return_lse=True, implementation="cuda", num_splits=num_splits)
    return jax.jit(functools.partial(decode_attention, **options))


def run(problem: Problem, q: Any, num_splits: Any) -> Any:
    arrays = [q, problem.k_pages, problem.v_pages, problem.page_table, problem.kv_lens]
    scales = {name: jnp.asarray(v, jnp.float32) for name, v in problem.options.items()}
    operands = [jnp.asarray(array) for array in arrays]
    return jax.tree.map(np.asarray, public(num_splits)(*operands, **scales))


def truth_of(problem: Problem, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    batch, q_len, heads, dim = values.shape
    kv_heads = problem.k_pages.shape[1]
    group = heads // kv_heads
    out, lse = np.zeros(values.shape), np.zeros(values.shape[:3])
    for b in range(batch):
        # A row for each query token and head of a KV head.
        rows = values[b].reshape(q_len, kv_heads, group, dim).swapaxes(1, 2)
        positions = np.repeat(int(problem.kv_lens[b]) - q_len + np.arange(q_len), group)
        truth = problem.sampled(b, rows.reshape(q_len * group, kv_heads, dim), positions)
        own = truth.out.reshape(q_len, group, kv_heads, dim).swapaxes(1, 2)
        out[b] = own.reshape(q_len, heads, dim)
        lse[b] = truth.lse.reshape(q_len, group, kv_heads).swapaxes(1, 2).reshape(q_len, heads)
    return out, lse


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, rng: np.random.Generator) -> None:
    problem, q, values = draw(name, rng)
    want_out, want_lse = truth_of(problem, values)
    size = np.abs(np.where(np.isfinite(want_lse), want_lse, 0))
    for num_splits in (None, "static"):
        out, lse = run(problem, q, num_splits)
        assert_close(lse, want_lse, atol=LSE_ERROR + 1e-6 * size)
        assert_close(out, want_out, atol=SUM_ERROR[problem.k_pages.dtype], rtol=2.0**-8)
        assert cosine(out, want_out) >= 0.99999
        # Of a long sequence results are small, and the bound says little.
        longest = int(np.argmax(problem.kv_lens))
        assert cosine(out[longest], want_out[longest]) >= 0.9999
        for again, first in zip(run(problem, q, num_splits), (out, lse), strict=True):
            assert_bitwise(again, first)
