"""prefill_attention against float64, in both jnp forms, over the whole contract."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import fp8
from jax_hpc.ops.decode_attention import decode_attention
from jax_hpc.ops.prefill_attention import prefill_attention
from jax_hpc.ops.prefill_attention.cases import CASES as CASE_LIST
from jax_hpc.ops.prefill_attention.cases import HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS, PAGE_SIZE
from jax_hpc.ops.prefill_attention.primitive import OPERATOR
from jax_hpc.ops.prefill_attention.signature import Operands, Params
from tests.support.attention_truth import BF16, E4M3, Problem, make_problem
from tests.support.numerics import assert_bitwise, assert_close, cosine

F32 = np.dtype(np.float32)
# (rows, tokens in the cache) per sequence: chunks of none, one and many rows, on nothing and on
# much. The long ones need several blocks of rows (256) and of keys (512) in the XLA form.
LONG = [(300, 300), (1, 900), (0, 0), (0, 70), (40, 600), (1, 1), (5, 517)]
SHORT = [(7, 20), (0, 16), (1, 33), (16, 16), (3, 2)]  # the last has more rows than tokens
# name: (q dtype, cache dtype, sequences, Hq, Hkv, D, N, options)
CASES: dict[str, tuple[Any, Any, Any, int, int, int, int, dict[str, Any]]] = {
    "f32-plain": (F32, F32, LONG, 3, 3, 8, 16, {}),
    "f32-everything": (
        F32,
        F32,
        LONG,
        4,
        2,
        8,
        64,
        {"window": 100, "sinks": True, "logit_cap": 2.0, "scale": 0.7},
    ),
    "bf16-group-12": (BF16, BF16, SHORT, 12, 1, 16, 128, {"window": 5}),
    "bf16-head-64": (BF16, BF16, SHORT, 8, 2, 64, 64, {"sinks": True}),
    "fp8-scales-per-tensor": (E4M3, E4M3, SHORT, 5, 1, 32, 32, {"k_scale": 0.5, "v_scale": 2.0}),
    "fp8-scales-per-token": (
        E4M3,
        E4M3,
        SHORT,
        8,
        2,
        32,
        16,
        {"k_scale": "P Hkv N", "v_scale": "Hkv", "window": 1, "sinks": True},
    ),
}


class Chunks:
    """Rows of several sequences in no order, with rows of none between and behind them."""

    def __init__(self, rng: np.random.Generator, sequences: list[tuple[int, int]]) -> None:
        self.lens = np.array([rows for rows, _ in sequences], np.int32)
        self.starts = np.zeros(len(sequences), np.int32)
        self.total = 2
        for b in rng.permutation(len(sequences)):
            self.starts[b] = self.total
            self.total += int(self.lens[b]) + int(rng.integers(0, 3))
        # A sequence without rows may start anywhere.
        self.starts[self.lens == 0] = rng.choice([-5, 10**6], int(np.sum(self.lens == 0)))


def draw(name: str, rng: np.random.Generator) -> tuple[Problem, Chunks, Any, Any]:
    q_dtype, dtype, sequences, heads, kv_heads, dim, size, options = CASES[name]
    width = max(-(-max(n for _, n in sequences) // size), 2)
    problem = make_problem(
        rng,
        [n for _, n in sequences],
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=size,
        width=width,
        dtype=dtype,
    )
    drawn = {
        "sinks": rng.normal(0, 2, heads).astype(F32),
        "Hkv": rng.uniform(0.5, 2, kv_heads).astype(F32),
        "P Hkv N": rng.uniform(0.5, 2, problem.k_pages.shape[:3]).astype(F32),
    }
    problem.options = {
        key: drawn[key] if key in drawn else drawn.get(value, value)
        for key, value in options.items()
    }
    if sequences is LONG:
        problem.page_table[1, 0] = -1  # a missing page
        problem.page_table[4, 0] = problem.page_table[0, 0]  # a shared one
    chunks = Chunks(rng, sequences)
    q = rng.normal(0, 1, (chunks.total, heads, dim)).astype(q_dtype)
    q_scale = rng.uniform(0.5, 2, q.shape[:2]).astype(F32) if q_dtype == E4M3 else None
    return problem, chunks, q, q_scale


def arrays_of(problem: Problem, chunks: Chunks, q: Any) -> Any:
    arrays = [q, problem.k_pages, problem.v_pages, problem.page_table]
    return [jnp.asarray(a) for a in (*arrays, chunks.starts, chunks.lens, problem.kv_lens)]


@functools.cache
def public(static: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(prefill_attention, **dict(static)))


def run(problem: Problem, chunks: Chunks, q: Any, q_scale: Any = None, **more: Any) -> Any:
    """Output and log-sum-exp of the public function."""
    options = {"max_q_len": int(chunks.lens.max()), "return_lse": True}
    options |= {**problem.options, **more}
    traced = {k: jnp.asarray(v) for k, v in options.items() if isinstance(v, np.ndarray)}
    static = tuple((key, value) for key, value in options.items() if key not in traced)
    if q_scale is not None:
        traced["q_scale"] = jnp.asarray(q_scale)
    return public(static)(*arrays_of(problem, chunks, q), **traced)


def run_reference(problem: Problem, chunks: Chunks, q: Any, q_scale: Any) -> Any:
    """Output and log-sum-exp of the definition, reference.py."""
    o = problem.options
    optional = [o.get("sinks"), q_scale, o.get("k_scale"), o.get("v_scale")]
    optional = [None if x is None else jnp.asarray(x, jnp.float32) for x in optional]
    scale = o.get("scale", q.shape[-1] ** -0.5)
    params = Params(scale, o.get("window"), o.get("logit_cap"), int(chunks.lens.max()), True)
    operands = Operands(*arrays_of(problem, chunks, q), *optional)
    return jax.jit(OPERATOR.reference, static_argnums=1)(operands, params)


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, rng):
    problem, chunks, q, q_scale = draw(name, rng)
    want_out, want_lse = problem.prefill(q, chunks.starts, chunks.lens, q_scale)
    for out, lse in (
        run_reference(problem, chunks, q, q_scale),
        run(problem, chunks, q, q_scale),
    ):
        assert out.dtype == (F32 if q.dtype == F32 else BF16) and lse.dtype == F32
        assert_close(lse, want_lse, atol=2e-5)
        # The sums are float32; all that bfloat16 adds is the rounding of the result: half an ulp.
        assert_close(out, want_out, atol=5e-6, rtol=0 if q.dtype == F32 else 2.0**-8)
        assert cosine(out, want_out) >= (0.9995 if q.dtype == E4M3 else 0.99999)


@pytest.fixture(scope="module")
def small():
    """A small bf16 problem; its call is compiled once for the tests that follow."""
    rng = np.random.default_rng(11)
    problem = make_problem(
        rng, [40, 0, 17, 33], num_kv_heads=2, head_dim=8, page_size=16, width=4, dtype=BF16
    )
    chunks = Chunks(rng, [(12, 40), (0, 0), (1, 17), (9, 33)])
    q = rng.normal(0, 1, (chunks.total, 4, 8)).astype(BF16)
    return problem, chunks, q


def numpy_run(*args: Any) -> tuple[np.ndarray, np.ndarray]:
    return jax.tree.map(np.asarray, run(*args))


def test_nan_row_stays_in_its_row(small):
    problem, chunks, q = small
    clean = numpy_run(problem, chunks, q)
    row = chunks.starts[0] + 5
    dirty_q = q.copy()
    dirty_q[row, 1] = np.nan
    dirty_q[0] = np.nan  # a row of no sequence
    out, lse = numpy_run(problem, chunks, dirty_q)
    keep = np.ones(q.shape[:2], bool)
    keep[row, 1] = False
    assert np.isnan(out[row, 1].astype(F32)).all() and np.isnan(lse[row, 1])
    assert_bitwise(out[keep], clean[0][keep])
    assert_bitwise(lse[keep], clean[1][keep])
    assert np.all(out[0] == 0) and np.all(np.isneginf(lse[0]))


@pytest.mark.parametrize("what", ["k_pages", "v_pages"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poisoned_token_reaches_only_later_rows(small, what, poison):
    problem, chunks, q = small
    clean = numpy_run(problem, chunks, q)
    position = 40 - 12 + 8  # of row 8 of the first chunk
    pages, place = getattr(problem, what), (problem.page_table[0, position // 16], 1)
    saved = pages[*place, position % 16].copy()
    pages[*place, position % 16] = poison
    out, _ = numpy_run(problem, chunks, q)
    pages[*place, position % 16] = saved
    reached = np.zeros(q.shape[:2], bool)
    reached[chunks.starts[0] + 8 : chunks.starts[0] + 12, 2:] = True  # the heads of KV head 1
    assert not np.isfinite(out[reached].astype(F32)).all(axis=-1).any()
    assert_bitwise(out[~reached], clean[0][~reached])


def test_a_chunk_is_its_rows_decoded_one_by_one(small):
    """Prefill of the last rows and a decode step of the same tokens agree."""
    problem, chunks, q = small
    out, lse = run(problem, chunks, q)
    rows = chunks.starts[3] + np.arange(5, 9)
    args = [problem.k_pages, problem.v_pages, problem.page_table[3:], problem.kv_lens[3:]]
    decode = jax.jit(functools.partial(decode_attention, return_lse=True))
    step_out, step_lse = decode(q[rows][None], *map(jnp.asarray, args))
    assert_close(step_out[0], out[rows], atol=1e-6, rtol=2.0**-8)
    assert_close(step_lse[0], lse[rows], atol=1e-5)


@pytest.mark.parametrize("max_q_len", [280, 512])
def test_rows_beyond_max_q_len_are_zero(rng, max_q_len):
    """A bound within the second block of rows (256), and one above all rows."""
    problem = make_problem(
        rng, [300, 3], num_kv_heads=1, head_dim=4, page_size=64, width=5, dtype=F32
    )
    chunks = Chunks(rng, [(300, 300), (3, 3)])
    q = rng.normal(0, 1, (chunks.total, 1, 4)).astype(F32)
    want, want_lse = problem.prefill(q, chunks.starts, chunks.lens)
    missing = slice(chunks.starts[0] + min(max_q_len, 300), chunks.starts[0] + 300)
    want[missing], want_lse[missing] = 0, -np.inf
    out, lse = run(problem, chunks, q, max_q_len=max_q_len)
    assert_close(out, want, atol=5e-6)
    assert_close(lse, want_lse, atol=1e-5)


def test_query_is_quantised_as_outside(rng):
    problem = make_problem(
        rng, [30, 5], num_kv_heads=1, head_dim=32, page_size=16, width=2, dtype=E4M3
    )
    chunks = Chunks(rng, [(6, 30), (2, 5)])
    q = rng.normal(0, 3, (chunks.total, 2, 32)).astype(BF16)

    @jax.jit
    def outside(q):
        scale = fp8.amax_scale(q, axis=-1)
        return fp8.quantize(q, scale[..., None]), scale

    q8, q_scale = map(np.asarray, outside(jnp.asarray(q)))
    inside, inside_lse = run(problem, chunks, q)
    ahead, ahead_lse = run(problem, chunks, q8, q_scale)
    assert_bitwise(inside, ahead)
    assert_bitwise(inside_lse, ahead_lse)
    want, _ = problem.prefill(q8, chunks.starts, chunks.lens, q_scale)
    assert_close(ahead, want, atol=5e-6, rtol=2.0**-8)


@pytest.mark.parametrize("empty", ["B", "P", "M", "T"])
def test_empty_sizes(empty):
    size = {"B": 2, "P": 3, "M": 2, "T": 4, empty: 0}
    pages = jnp.ones((size["P"], 1, 16, 8))
    counts = jnp.full(size["B"], 2, jnp.int32)
    out, lse = prefill_attention(
        jnp.ones((size["T"], 2, 8)),
        pages,
        pages,
        jnp.zeros((size["B"], size["M"]), jnp.int32),
        2 * jnp.arange(size["B"], dtype=jnp.int32),
        counts,
        counts,
        max_q_len=2,
        return_lse=True,
    )
    assert out.shape == (size["T"], 2, 8) and np.all(np.asarray(out) == 0)
    assert lse.shape == (size["T"], 2) and np.all(np.isneginf(np.asarray(lse)))


def test_memory_follows_the_block_not_the_table():
    """A table 64 blocks wide: neither its keys nor its scores are held at once."""
    pages = jax.ShapeDtypeStruct((4, 1, 16, 8), jnp.float32)
    table = jax.ShapeDtypeStruct((2, 2048), jnp.int32)
    q = jax.ShapeDtypeStruct((64, 1, 8), jnp.float32)
    counts = jax.ShapeDtypeStruct((2,), jnp.int32)
    call = functools.partial(prefill_attention, max_q_len=64)
    compiled: Any = jax.jit(call).lower(q, pages, pages, table, counts, counts, counts).compile()
    scores_at_once = 64 * 2048 * 16 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < scores_at_once / 8


@pytest.mark.parametrize("case", CASE_LIST, ids=lambda case: case.name)
def test_shapes_of_the_baselines(case):
    cache = jax.ShapeDtypeStruct((9, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM), jnp.bfloat16)
    counts = jax.ShapeDtypeStruct((case.batch,), jnp.int32)
    out = jax.eval_shape(
        functools.partial(prefill_attention, max_q_len=case.q_len),
        jax.ShapeDtypeStruct((case.tokens, NUM_Q_HEADS, HEAD_DIM), jnp.bfloat16),
        cache,
        cache,
        jax.ShapeDtypeStruct((case.batch, -(-case.kv_len // PAGE_SIZE)), jnp.int32),
        counts,
        counts,
        counts,
    )
    assert out.shape == (case.tokens, NUM_Q_HEADS, HEAD_DIM)


def test_vmap_is_refused_with_advice(small):
    problem, chunks, q = small
    args = arrays_of(problem, chunks, q)
    call = functools.partial(prefill_attention, max_q_len=12)
    with pytest.raises(NotImplementedError, match="prefill_attention: vmap is not supported") as e:
        jax.vmap(lambda q: call(q, *args[1:]))(jnp.stack([args[0]] * 2))
    assert "already batched over sequences" in str(e.value)


def good() -> dict[str, Any]:
    pages = np.zeros((3, 2, 16, 8), BF16)
    lens = np.zeros(2, np.int32)
    return {
        "q": np.zeros((5, 4, 8), BF16),
        "k_pages": pages,
        "v_pages": pages,
        "page_table": np.zeros((2, 2), np.int32),
        "q_starts": lens,
        "q_lens": lens,
        "kv_lens": lens,
        "max_q_len": 4,
    }


ones = functools.partial(np.ones, dtype=F32)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "q": ({"q": ones((5, 1, 4, 8))}, ValueError, "'q' must have shape [T, Hq, D], got (5, 1, 4"),
    "q dtype": ({"q": ones((5, 4, 8)).astype(np.float16)}, TypeError, "'q' must be bfloat16 or"),
    "heads": ({"q": ones((5, 3, 8))}, ValueError, "a multiple of Hkv = 2, got Hq = 3"),
    "v_pages": ({"v_pages": ones((3, 2, 32, 8))}, ValueError, "'v_pages' must have shape [P, H"),
    "table": ({"page_table": ones((2, 2))}, TypeError, "'page_table' must be int32, got float32"),
    "starts": ({"q_starts": np.zeros(3, np.int32)}, ValueError, "'q_starts' must have shape [B]"),
    "starts dtype": ({"q_starts": ones(2)}, TypeError, "'q_starts' must be int32, got float32"),
    "q_lens": ({"q_lens": np.zeros(3, np.int32)}, ValueError, "'q_lens' must have shape [B]"),
    "kv_lens": ({"kv_lens": np.zeros(3, np.int32)}, ValueError, "'kv_lens' must have shape [B]"),
    "max": ({"max_q_len": 0}, ValueError, "'max_q_len' must be max_q_len >= 1, got 0"),
    "max type": ({"max_q_len": ones(())}, TypeError, "'max_q_len' must be a Python int"),
    "window": ({"window": -1}, ValueError, "'window' must be window >= 1, got -1"),
    "cap": ({"logit_cap": -1.0}, ValueError, "'logit_cap' must be None or finite and > 0, got -1"),
    "sinks": ({"sinks": ones(3)}, ValueError, "'sinks' must have shape [Hq] with Hq = 4"),
    "v_scale": ({"v_scale": 2.0}, ValueError, "'v_scale' must be None on a cache of bfloat16"),
    "q_scale": ({"q_scale": ones((5, 4))}, ValueError, "'q_scale' must be float32 [T, Hq] with"),
    "cuda": ({"implementation": "cuda"}, NotImplementedError, "no CUDA kernel for this call"),
}


@pytest.mark.parametrize("name", BAD)
def test_rejects_bad_arguments(name):
    changed, error, words = BAD[name]
    with pytest.raises(error, match="^prefill_attention: ") as caught:
        prefill_attention(**{**good(), **changed})
    assert words in str(caught.value)
