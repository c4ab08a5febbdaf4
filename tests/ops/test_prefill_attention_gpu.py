"""The prefill_attention kernel on a GPU: truth, edges, bits, graphs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import fp8
from jax_hpc.ops.decode_attention import decode_attention
from jax_hpc.ops.prefill_attention import prefill_attention
from tests.support.attention_bounds import LSE_ERROR, SCORE_ERROR, WEIGHT_ERROR
from tests.support.attention_truth import BF16, E4M3, Problem, make_problem
from tests.support.numerics import assert_bitwise, assert_close, cosine

pytestmark = pytest.mark.gpu

F32 = np.dtype(np.float32)
# (rows, tokens in the cache) per sequence: none, one and many rows, on nothing and on much; rows
# before the first token; one more and one less than a tile of 128 keys.
CHUNKS = [
    (0, 0),
    (140, 140),
    (1, 900),
    (1, 1),
    (0, 70),
    (40, 1100),
    (5, 517),
    (3, 2),
    (128, 128),
    (129, 129),
    (127, 383),
    (17, 256),
    (2, 130),
]
# name: (q dtype, cache dtype, G, Hkv, D, N, options); an option that is no number is drawn.
CASES: dict[str, tuple[Any, Any, int, int, int, int, dict[str, Any]]] = {
    "tp8": (BF16, BF16, 8, 1, 128, 64, {}),
    "three-kv-heads": (BF16, BF16, 8, 3, 128, 64, {}),
    "group-1": (BF16, BF16, 1, 2, 128, 16, {"window": 100}),
    "group-4": (BF16, BF16, 4, 2, 64, 32, {"sinks": "Hq"}),
    "group-5": (BF16, BF16, 5, 2, 64, 128, {"sinks": "Hq", "window": 128}),
    "group-6-cap": (BF16, BF16, 6, 1, 128, 128, {"logit_cap": 2.0, "scale": 0.7}),
    "group-7": (BF16, BF16, 7, 1, 64, 64, {"window": 600}),
    "group-12": (BF16, BF16, 12, 1, 128, 64, {"sinks": "Hq", "logit_cap": 30.0}),
    "group-16": (BF16, BF16, 16, 3, 64, 16, {}),
    "window-of-one": (BF16, BF16, 8, 1, 128, 32, {"window": 1, "sinks": "Hq"}),
    "fp8-tensor": (E4M3, E4M3, 8, 1, 128, 64, {"k_scale": 0.5, "v_scale": 2.0}),
    "fp8-head": (E4M3, E4M3, 4, 2, 64, 16, {"k_scale": "Hkv", "v_scale": "Hkv"}),
    "fp8-token": (E4M3, E4M3, 6, 3, 128, 32, {"k_scale": "P Hkv N", "window": 520}),
    "fp8-token-16": (E4M3, E4M3, 8, 2, 64, 16, {"k_scale": "P Hkv N", "sinks": "Hq"}),
    "fp8-bf16-query": (BF16, E4M3, 8, 2, 128, 128, {"v_scale": 0.25}),
    "fp8-bf16-query-cap": (BF16, E4M3, 5, 1, 64, 64, {"logit_cap": 5.0, "sinks": "Hq"}),
}


class Rows:
    """The rows of several chunks in no order, with rows of none between and behind them."""

    def __init__(self, rng: np.random.Generator, chunks: list[tuple[int, int]]) -> None:
        self.lens = np.array([rows for rows, _ in chunks], np.int32)
        self.starts = np.zeros(len(chunks), np.int32)
        self.total = 2
        for b in rng.permutation(len(chunks)):
            self.starts[b] = self.total
            self.total += int(self.lens[b]) + int(rng.integers(0, 3))
        # A sequence without rows may start anywhere.
        self.starts[self.lens == 0] = rng.choice([-5, 10**6], int(np.sum(self.lens == 0)))


def draw(
    name: str, rng: np.random.Generator
) -> tuple[Problem, Rows, np.ndarray, np.ndarray | None]:
    q_dtype, dtype, group, kv_heads, dim, size, options = CASES[name]
    lens = [length for _, length in CHUNKS]
    problem = make_problem(
        rng,
        lens,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=size,
        width=-(-max(lens) // size),
        dtype=dtype,
    )
    heads = group * kv_heads
    unwritten = np.isnan(problem.k_pages.astype(F32)).all(axis=-1)
    token_scale = rng.uniform(0.5, 2, unwritten.shape).astype(F32)
    drawn = {
        "Hq": rng.normal(0, 2, heads).astype(F32),
        "Hkv": rng.uniform(0.5, 2, kv_heads).astype(F32),
        "P Hkv N": np.where(unwritten, np.float32(np.nan), token_scale),
    }
    problem.options = {key: drawn.get(value, value) for key, value in options.items()}
    problem.page_table[5, 1] = -1  # missing pages, and a shared one
    problem.page_table[2, 0] = problem.k_pages.shape[0]
    problem.page_table[6, 0] = problem.page_table[1, 0]
    rows = Rows(rng, CHUNKS)
    q = rng.normal(0, 2, (rows.total, heads, dim)).astype(q_dtype)
    q_scale = rng.uniform(0.25, 1, q.shape[:2]).astype(F32) if q_dtype == E4M3 else None
    return problem, rows, q, q_scale


def operands_of(problem: Problem, rows: Rows, q: Any) -> list[Any]:
    arrays = [q, problem.k_pages, problem.v_pages, problem.page_table]
    return [jnp.asarray(a) for a in (*arrays, rows.starts, rows.lens, problem.kv_lens)]


@functools.cache
def public(static: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(prefill_attention, **dict(static)))


def run(problem: Problem, rows: Rows, q: Any, q_scale: Any = None, **more: Any) -> Any:
    """Output and log-sum-exp of the kernel."""
    options = {"max_q_len": int(rows.lens.max()), "return_lse": True, "implementation": "cuda"}
    options |= {**problem.options, **more}
    traced = {key: jnp.asarray(v) for key, v in options.items() if isinstance(v, np.ndarray)}
    if q_scale is not None:
        traced["q_scale"] = jnp.asarray(q_scale)
    static = tuple((key, value) for key, value in options.items() if key not in traced)
    return public(static)(*operands_of(problem, rows, q), **traced)


def magnitudes_of(values: np.ndarray) -> np.ndarray:
    return np.abs(values.astype(F32)).astype(values.dtype)


def largest_scores(problem: Problem, rows: Rows, q: np.ndarray, q_scale: Any) -> np.ndarray:
    """Of each row, an upper bound of the sum of magnitudes of a score's terms; 0 without a key."""
    options = {k: v for k, v in problem.options.items() if k not in ("sinks", "logit_cap")}
    magnitudes = dataclasses.replace(
        problem, k_pages=magnitudes_of(problem.k_pages), options=options
    )
    lse = magnitudes.prefill(magnitudes_of(q), rows.starts, rows.lens, q_scale)[1]
    return np.where(np.isfinite(lse), lse, 0)


def spread(problem: Problem, rows: Rows, q: np.ndarray, q_scale: Any) -> np.ndarray:
    """Probabilities times magnitudes of values: what rounding probabilities can cost."""
    magnitudes = dataclasses.replace(problem, v_pages=magnitudes_of(problem.v_pages))
    return np.asarray(run(magnitudes, rows, q, q_scale, implementation="xla")[0]).astype(F32)


def quantized(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = fp8.amax_scale(jnp.asarray(q), axis=-1)
    return np.asarray(fp8.quantize(jnp.asarray(q), scale[..., None])), np.asarray(scale)


def largest_error(got: Any, want: np.ndarray) -> float:
    return float(np.abs(np.asarray(got, np.float64) - want).max())


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, rng: np.random.Generator) -> None:
    problem, rows, q, q_scale = draw(name, rng)
    cache = problem.k_pages.dtype
    values, scale = (q, q_scale) if q_scale is not None or cache == BF16 else quantized(q)
    want_out, want_lse = problem.prefill(values, rows.starts, rows.lens, scale)
    out, lse = run(problem, rows, q, q_scale)
    assert out.dtype == BF16 and lse.dtype == F32
    size = np.abs(np.where(np.isfinite(want_lse), want_lse, 0))
    scores = 0 if cache == BF16 else SCORE_ERROR * largest_scores(problem, rows, values, scale)
    assert_close(lse, want_lse, atol=LSE_ERROR + 1e-6 * size + scores)
    # e4m3 has no number below 2^-10 of the largest, times 256.
    weights = WEIGHT_ERROR[cache] * spread(problem, rows, q, q_scale)
    assert_close(out, want_out, atol=weights + (5e-6 if cache == BF16 else 5e-3), rtol=2.0**-8)
    assert cosine(out, want_out) >= (0.99999 if cache == BF16 else 0.9995)
    if cache == BF16:
        by_xla = run(problem, rows, q, implementation="xla")[0]
        assert largest_error(out, want_out) <= 2 * largest_error(by_xla, want_out)
    assert_bitwise(run(problem, rows, q, q_scale)[0], out)
    assert_bitwise(run(problem, rows, q, q_scale, return_lse=False), out)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "fp8"])
def test_tiny_probabilities(rng: np.random.Generator, dtype: Any) -> None:
    """Scores of every spread: heads of equal probabilities, and of ones that fall by 2^-20."""
    problem = make_problem(
        rng, [4096], num_kv_heads=1, head_dim=128, page_size=64, width=64, dtype=dtype
    )
    rows = Rows(rng, [(32, 4096)])
    q = rng.normal(0, 1, (rows.total, 8, 128)).astype(dtype)
    q_scale = np.tile(np.geomspace(0.01, 8, 8).astype(F32), (rows.total, 1))
    scale = q_scale if dtype == E4M3 else None
    if dtype == BF16:
        q = (q.astype(F32) * q_scale[..., None]).astype(BF16)
    want_out, want_lse = problem.prefill(q, rows.starts, rows.lens, scale)
    out, lse = run(problem, rows, q, scale)
    size = np.abs(np.where(np.isfinite(want_lse), want_lse, 0))
    scores = 0 if dtype == BF16 else SCORE_ERROR * largest_scores(problem, rows, q, scale)
    assert_close(lse, want_lse, atol=LSE_ERROR + 1e-6 * size + scores)
    for head in range(8):
        least = 0.99999 if dtype == BF16 else 0.9995
        assert cosine(out[:, head], want_out[:, head]) >= least


@pytest.fixture(scope="module")
def small() -> tuple[Problem, Rows, np.ndarray]:
    rng = np.random.default_rng(11)
    chunks = [(12, 140), (0, 0), (1, 17), (90, 333)]
    problem = make_problem(
        rng,
        [n for _, n in chunks],
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        width=24,
        dtype=BF16,
    )
    problem.options = {"window": 170}
    rows = Rows(rng, chunks)
    return problem, rows, rng.normal(0, 1, (rows.total, 8, 64)).astype(BF16)


def numpy_run(*args: Any, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    return jax.tree.map(np.asarray, run(*args, **more))


def test_nan_row_stays_in_its_row(small: Any) -> None:
    problem, rows, q = small
    clean = numpy_run(problem, rows, q)
    row = rows.starts[0] + 5
    dirty_q = q.copy()
    dirty_q[row, 1] = np.nan
    dirty_q[0] = np.nan  # a row of no sequence
    out, lse = numpy_run(problem, rows, dirty_q)
    keep = np.ones(q.shape[:2], bool)
    keep[row, 1] = False
    assert np.isnan(out[row, 1].astype(F32)).all() and np.isnan(lse[row, 1])
    assert_bitwise(out[keep], clean[0][keep])
    assert_bitwise(lse[keep], clean[1][keep])
    assert np.all(out[0] == 0) and np.all(np.isneginf(lse[0]))


@pytest.mark.parametrize("what", ["k_pages", "v_pages"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poisoned_token_reaches_only_later_rows(small: Any, what: str, poison: float) -> None:
    problem, rows, q = small
    clean = numpy_run(problem, rows, q)
    position = 140 - 12 + 8  # of row 8 of the first chunk
    pages, place = getattr(problem, what), (problem.page_table[0, position // 16], 1)
    saved = pages[*place, position % 16].copy()
    pages[*place, position % 16, 3] = poison
    out, _ = numpy_run(problem, rows, q)
    pages[*place, position % 16] = saved
    reached = np.zeros(q.shape[:2], bool)
    reached[rows.starts[0] + 8 : rows.starts[0] + 12, 4:] = True  # the heads of KV head 1
    if np.isnan(poison) or what == "v_pages":
        assert np.isnan(out[reached].astype(F32)).any(axis=-1).all()
    assert_bitwise(out[~reached], clean[0][~reached])


def test_out_of_window_pages_may_be_gone(small: Any) -> None:
    problem, rows, q = small
    clean = numpy_run(problem, rows, q)[0]
    saved = problem.page_table.copy()
    problem.page_table[3, : (333 - 90 - 170) // 16] = -1
    gone = numpy_run(problem, rows, q)[0]
    problem.page_table[:] = saved
    assert_bitwise(gone, clean)


@pytest.mark.parametrize("name", ["tp8", "fp8-tensor"])
def test_together_as_apart(name: str, rng: np.random.Generator) -> None:
    """Decode rows and chunks of prompts in one call: each gets the bits of its own call."""
    problem, rows, q, q_scale = draw(name, rng)
    together, lse = numpy_run(problem, rows, q, q_scale)
    for b in (1, 2, 5, 8):
        alone = Rows(rng, CHUNKS)
        alone.starts, alone.lens = rows.starts.copy(), np.zeros_like(rows.lens)
        alone.lens[b] = rows.lens[b]
        out, own_lse = numpy_run(problem, alone, q, q_scale, max_q_len=140)
        own = slice(rows.starts[b], rows.starts[b] + rows.lens[b])
        assert_bitwise(out[own], together[own])
        assert_bitwise(own_lse[own], lse[own])
        assert not out[np.setdiff1d(np.arange(rows.total), np.arange(own.start, own.stop))].any()


def test_rows_beyond_max_q_len_are_zero(small: Any) -> None:
    problem, rows, q = small
    out, lse = map(np.copy, numpy_run(problem, rows, q))
    missing = slice(rows.starts[3] + 50, rows.starts[3] + 90)
    out[missing], lse[missing] = 0, -np.inf
    got, got_lse = numpy_run(problem, rows, q, max_q_len=50)
    assert_bitwise(got, out)
    assert_bitwise(got_lse, lse)


def test_decode_rows_agree_with_decode_attention(rng: np.random.Generator) -> None:
    lens = [700, 64, 1, 2000]
    problem = make_problem(
        rng, lens, num_kv_heads=2, head_dim=128, page_size=64, width=32, dtype=BF16
    )
    q = rng.normal(0, 1, (4, 16, 128)).astype(BF16)
    arrays = [problem.k_pages, problem.v_pages, problem.page_table]
    k, v, table = map(jnp.asarray, arrays)
    rows, ones = jnp.arange(4, dtype=jnp.int32), jnp.ones(4, jnp.int32)
    call = functools.partial(prefill_attention, max_q_len=1, implementation="cuda")
    got = jax.jit(call)(jnp.asarray(q), k, v, table, rows, ones, jnp.asarray(lens, jnp.int32))
    step = jax.jit(functools.partial(decode_attention, implementation="xla"))
    want = step(jnp.asarray(q), k, v, table, jnp.asarray(lens, jnp.int32))
    assert_close(got, want, atol=2e-3, rtol=2.0**-7)


def test_query_is_quantised_as_outside(rng: np.random.Generator) -> None:
    problem = make_problem(
        rng, [300, 5], num_kv_heads=1, head_dim=128, page_size=16, width=20, dtype=E4M3
    )
    rows = Rows(rng, [(30, 300), (3, 5)])
    q = rng.normal(0, 3, (rows.total, 4, 128)).astype(BF16)
    q[rows.starts[0], 1] = 0  # amax 0: scale 1
    inside, inside_lse = run(problem, rows, q)
    ahead, ahead_lse = run(problem, rows, *quantized(q))
    assert_bitwise(inside, ahead)
    assert_bitwise(inside_lse, ahead_lse)


def test_in_a_loop_as_eagerly(small: Any) -> None:
    """Command buffers: the same bits as eager calls, for lengths that change from step to step."""
    problem, rows, q = small
    q, k, v, table, starts, lens, kv_lens = operands_of(problem, rows, q)

    def step(i: Any, lens: jax.Array) -> jax.Array:
        arrays = (k, v, table, starts, jnp.maximum(lens - i, 0), kv_lens)
        return prefill_attention(q, *arrays, max_q_len=90, implementation="cuda")

    @jax.jit
    def loop(lens: jax.Array) -> jax.Array:
        def body(i: Any, outs: jax.Array) -> jax.Array:
            return outs.at[i].set(step(i, lens))

        return jax.lax.fori_loop(0, 5, body, jnp.zeros((5, *q.shape), q.dtype))

    outs = loop(lens)
    for i in range(5):
        assert_bitwise(outs[i], step(i, lens))
