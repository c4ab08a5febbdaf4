"""The prefill_attention kernel at the sizes that it is timed at, by sampled rows in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import fp8
from jax_hpc.ops.prefill_attention import prefill_attention
from jax_hpc.ops.prefill_attention.cases import HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS, PAGE_SIZE
from tests.support.attention_bounds import LSE_ERROR, SCORE_ERROR, WEIGHT_ERROR
from tests.support.attention_truth import BF16, E4M3, Problem, make_problem
from tests.support.numerics import assert_bitwise, assert_close, cosine

pytestmark = pytest.mark.gpu

GROUP = NUM_Q_HEADS // NUM_KV_HEADS
# (rows, tokens in the cache) per sequence. Keys and values of the longest, of all KV heads, are
# more than the L2 cache shall hold (heads_at_a_time in cuda/prefill_attention/plan.cuh): 80 MiB in
# bf16, where two heads at a time fit, and 40 MiB in fp8, where four do.
CHUNKS = [(1, 9000), (3000, 20500), (0, 700), (512, 2500)]


def draw(rng: np.random.Generator, dtype: Any) -> tuple[Problem, np.ndarray, np.ndarray]:
    """A cache, where chunks start, and q: rows of no sequence before, between and behind them."""
    lens = [length for _, length in CHUNKS]
    problem = make_problem(
        rng,
        lens,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        page_size=PAGE_SIZE,
        width=-(-max(lens) // PAGE_SIZE),
        dtype=dtype,
    )
    if dtype == E4M3:
        problem.options = {"k_scale": 0.5, "v_scale": 2.0}
    rows = np.array([count for count, _ in CHUNKS])
    starts = (np.cumsum(rows) - rows + 3 * np.arange(1, len(rows) + 1)).astype(np.int32)
    q = rng.standard_normal((starts[-1] + rows[-1] + 2, NUM_Q_HEADS, HEAD_DIM), np.float32)
    return problem, starts, (2 * q).astype(BF16)


@functools.cache
def public(implementation: Any) -> Any:
    options: dict[str, Any] = dict(return_lse=True, implementation=implementation)
    return jax.jit(functools.partial(prefill_attention, **options), static_argnames="max_q_len")


def run(problem: Problem, starts: np.ndarray, q: Any, implementation: Any = "cuda") -> Any:
    lens = np.array([count for count, _ in CHUNKS], np.int32)
    arrays = [q, problem.k_pages, problem.v_pages, problem.page_table, starts, lens]
    operands = [jnp.asarray(a) for a in (*arrays, problem.kv_lens)]
    scales = {name: jnp.float32(value) for name, value in problem.options.items()}
    return public(implementation)(*operands, max_q_len=int(lens.max()), **scales)


def sample(rng: np.random.Generator, count: int, length: int) -> np.ndarray:
    """Rows of a chunk: its ends, those at borders of row tiles and of pages, and random ones."""
    tile = 128 // GROUP
    first_page = -(length - count) % PAGE_SIZE
    edges = np.array([0, 1, tile - 1, tile, first_page - 1, first_page, count - 2, count - 1])
    rows = np.concatenate([edges, rng.integers(0, max(count, 1), 120)])
    return np.unique(rows[(rows >= 0) & (rows < count)])


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "fp8"])
def test_against_float64(rng: np.random.Generator, dtype: Any) -> None:
    """Each sampled row by one head of each KV head; all rows come out the same again."""
    problem, starts, q = draw(rng, dtype)
    values = q
    if dtype == E4M3:
        scale = fp8.amax_scale(jnp.asarray(q), axis=-1)
        quantized = fp8.quantize(jnp.asarray(q), scale[..., None])
        values = np.asarray(quantized).astype(np.float32) * np.asarray(scale)[..., None]
    arrays = run(problem, starts, q)
    out, lse = map(np.asarray, arrays)
    for again, first in zip(run(problem, starts, q), (out, lse), strict=True):
        assert_bitwise(again, first)
    owned = np.zeros(len(q), bool)
    for b, (count, length) in enumerate(CHUNKS):
        owned[starts[b] : starts[b] + count] = True
        rows = sample(rng, count, length)
        if len(rows) == 0:
            continue
        heads = np.arange(NUM_KV_HEADS) * GROUP + rng.integers(0, GROUP, (len(rows), NUM_KV_HEADS))
        at = starts[b] + rows[:, None], heads
        truth = problem.sampled(b, values[at].astype(np.float64), length - count + rows)
        scores = SCORE_ERROR * truth.magnitude if dtype == E4M3 else 0
        assert_close(lse[at], truth.lse, atol=LSE_ERROR + 1e-6 * np.abs(truth.lse) + scores)
        rest = 5e-6 if dtype == BF16 else 5e-3
        atol = WEIGHT_ERROR[dtype] * truth.spread + rest
        assert_close(out[at], truth.out, atol=atol, rtol=2.0**-8)
        assert cosine(out[at], truth.out) >= (0.99999 if dtype == BF16 else 0.9995)
    assert not out[~owned].any() and np.isneginf(lse[~owned]).all()
