"""decode_attention against float64, in both jnp forms, over the whole contract."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import fp8
from jax_hpc.ops.decode_attention import decode_attention, xla
from jax_hpc.ops.decode_attention.cases import MODELS
from jax_hpc.ops.decode_attention.primitive import OPERATOR
from jax_hpc.ops.decode_attention.reference import query_positions
from jax_hpc.ops.decode_attention.signature import Operands, Params
from tests.support.attention_truth import BF16, E4M3, Problem, make_problem
from tests.support.decode_calls import schedule_for
from tests.support.numerics import assert_bitwise, assert_close, cosine

F32 = np.dtype(np.float32)
# name: (q dtype, cache dtype, S, Hq, Hkv, D, N, options). Tables are wider than one block of the
# XLA form (512 tokens). An option that is True is drawn at random.
CASES: dict[str, tuple[Any, Any, int, int, int, int, int, dict[str, Any]]] = {
    "f32-plain": (F32, F32, 1, 3, 3, 8, 16, {}),
    "f32-everything": (
        F32,
        F32,
        3,
        8,
        2,
        8,
        64,
        {"window": 100, "sinks": True, "logit_cap": 2.0, "scale": 0.7},
    ),
    "f32-window-of-one": (F32, F32, 8, 5, 1, 16, 32, {"window": 1, "sinks": True}),
    "f32-query-on-bf16-cache": (F32, BF16, 2, 12, 2, 8, 128, {"logit_cap": 1.0}),
    "bf16-group-7-odd-page": (BF16, BF16, 4, 7, 1, 8, 24, {"window": 600}),
    "bf16-group-16-head-64": (BF16, BF16, 1, 16, 1, 64, 64, {"sinks": True}),
    "fp8-scales-per-tensor": (E4M3, E4M3, 1, 8, 1, 32, 64, {"k_scale": 0.5, "v_scale": 2.0}),
    "fp8-scales-per-head": (
        E4M3,
        E4M3,
        2,
        8,
        2,
        16,
        16,
        {"k_scale": "Hkv", "v_scale": "Hkv", "sinks": True},
    ),
    "fp8-scales-per-token": (E4M3, E4M3, 5, 6, 3, 32, 32, {"k_scale": "P Hkv N", "window": 520}),
}


def draw(name: str, rng: np.random.Generator) -> tuple[Problem, np.ndarray, np.ndarray | None]:
    """A problem of every kind of length, its queries and their scales."""
    q_dtype, dtype, q_len, heads, kv_heads, dim, size, options = CASES[name]
    width = -(-1100 // size)
    lens = [0, 1, 2, q_len, size, size + 1, 511, 512, 513, width * size, 777]
    problem = make_problem(
        rng,
        lens,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=size,
        width=width,
        dtype=dtype,
    )
    problem.options = {
        key: draw_option(key, value, problem, heads, rng) for key, value in options.items()
    }
    # One page of each long sequence is missing from the pool, and two sequences share pages.
    problem.page_table[9, 1] = -1
    problem.page_table[8, 0] = problem.k_pages.shape[0]
    problem.page_table[7, :2] = problem.page_table[10, :2]
    shape = (len(lens), q_len, heads)
    q = rng.normal(0, 1, (*shape, dim)).astype(q_dtype)
    q_scale = rng.uniform(0.5, 2, shape).astype(F32) if q_dtype == E4M3 else None
    return problem, q, q_scale


def draw_option(key: str, value: Any, problem: Problem, heads: int, rng: Any) -> Any:
    if key == "sinks":
        return rng.normal(0, 2, heads).astype(F32)
    if value == "Hkv":
        return rng.uniform(0.5, 2, problem.k_pages.shape[1]).astype(F32)
    if value == "P Hkv N":
        scale = rng.uniform(0.5, 2, problem.k_pages.shape[:3]).astype(F32)
        # A slot never written has no scale either.
        unwritten = np.isnan(problem.k_pages.astype(F32)).all(axis=-1)
        return np.where(unwritten, np.float32(np.nan), scale)
    return value


@functools.cache
def public(static: tuple[tuple[str, Any], ...]) -> Any:
    """decode_attention as users call it: jitted, compiled once per shape and option."""
    return jax.jit(functools.partial(decode_attention, **dict(static)))


def run(problem: Problem, q: Any, q_scale: Any = None, schedule: Any = None, **more: Any) -> Any:
    """Output and log-sum-exp of the public function."""
    options = {**problem.options, **more, "return_lse": True}
    arrays = {key: value for key, value in options.items() if isinstance(value, np.ndarray)}
    if q_scale is not None:
        arrays["q_scale"] = q_scale
    static = tuple((key, value) for key, value in options.items() if key not in arrays)
    traced = {key: jnp.asarray(value) for key, value in arrays.items()}
    return public(static)(*operands_of(problem, q), schedule, **traced)


def operands_of(problem: Problem, q: Any) -> Any:
    arrays = [q, problem.k_pages, problem.v_pages, problem.page_table, problem.kv_lens]
    return [jnp.asarray(array) for array in arrays]


def run_reference(problem: Problem, q: Any, q_scale: Any) -> Any:
    """Output and log-sum-exp of the definition, reference.py."""
    o = problem.options
    optional = {name: o.get(name) for name in ("sinks", "k_scale", "v_scale")}
    optional = {
        name: None if value is None else jnp.asarray(value, jnp.float32)
        for name, value in {**optional, "q_scale": q_scale}.items()
    }
    scale = o.get("scale", q.shape[-1] ** -0.5)
    params = Params(scale, o.get("window"), o.get("logit_cap"), None, True)
    operands = Operands(*operands_of(problem, q), schedule=None, **optional)
    return jax.jit(OPERATOR.reference, static_argnums=1)(operands, params)


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, rng):
    problem, q, q_scale = draw(name, rng)
    want_out, want_lse = problem.decode(q, q_scale)
    size = np.abs(np.where(np.isfinite(want_lse), want_lse, 0))
    for out, lse in (run_reference(problem, q, q_scale), run(problem, q, q_scale)):
        assert out.dtype == (F32 if q.dtype == F32 else BF16) and lse.dtype == F32
        assert_close(lse, want_lse, atol=1e-5 + 1e-6 * size)
        # The sums are float32; all that bfloat16 adds is the rounding of the result: half an ulp.
        assert_close(out, want_out, atol=5e-6, rtol=0 if q.dtype == F32 else 2.0**-8)
        assert cosine(out, want_out) >= (0.9995 if q.dtype == E4M3 else 0.99999)
        assert np.all(np.asarray(out[0]) == 0) and np.all(np.isneginf(np.asarray(lse[0])))


@pytest.fixture(scope="module")
def small():
    """A small bf16 problem and its jitted call, compiled once for the tests that follow."""
    rng = np.random.default_rng(7)
    lens = [40, 0, 17, 33]
    problem = make_problem(
        rng, lens, num_kv_heads=2, head_dim=8, page_size=16, width=4, dtype=BF16
    )
    problem.options = {"window": 20}
    q = rng.normal(0, 1, (4, 2, 4, 8)).astype(BF16)
    return problem, q, lambda problem, q: jax.tree.map(np.asarray, run(problem, q))


def test_nan_query_stays_in_its_row(small):
    problem, q, run_small = small
    clean = run_small(problem, q)
    dirty_q = q.copy()
    dirty_q[2, 1, 3] = np.nan
    dirty = run_small(problem, dirty_q)
    keep = np.ones(q.shape[:3], bool)
    keep[2, 1, 3] = False
    assert np.isnan(dirty[0][2, 1, 3].astype(F32)).all() and np.isnan(dirty[1][2, 1, 3])
    assert_bitwise(dirty[0][keep], clean[0][keep])
    assert_bitwise(dirty[1][keep], clean[1][keep])


@pytest.mark.parametrize("what", ["k_pages", "v_pages"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poisoned_newest_token_reaches_only_who_sees_it(small, what, poison):
    """The last draft token's key and value are not seen by the one before it."""
    problem, q, run_small = small
    clean = run_small(problem, q)
    page = problem.page_table[0, 39 // 16]
    pages = getattr(problem, what)
    saved = pages[page, :, 39 % 16].copy()
    pages[page, 0, 39 % 16] = poison
    dirty = run_small(problem, q)
    pages[page, :, 39 % 16] = saved
    reached = np.zeros(q.shape[:3], bool)
    reached[0, 1, :2] = True  # the second query, the heads of KV head 0
    assert not np.isfinite(dirty[0][reached].astype(F32)).all(axis=-1).any()
    assert_bitwise(dirty[0][~reached], clean[0][~reached])


def test_out_of_window_pages_may_be_gone(small):
    """Keys before every window may be freed: their table entry and content are not read."""
    problem, q, run_small = small
    clean = run_small(problem, q)
    freed = problem.page_table[0, 0]
    saved = problem.page_table.copy()
    problem.page_table[0, 0] = -1
    assert_bitwise(run_small(problem, q)[0], clean[0])
    problem.page_table[:] = saved
    kept = problem.k_pages[freed].copy(), problem.v_pages[freed].copy()
    problem.k_pages[freed], problem.v_pages[freed] = np.nan, np.inf
    assert_bitwise(run_small(problem, q)[0], clean[0])
    problem.k_pages[freed], problem.v_pages[freed] = kept


def test_same_inputs_give_the_same_bits(small):
    problem, q, run_small = small
    first, second = run_small(problem, q), run_small(problem, q)
    assert_bitwise(first[0], second[0])
    assert_bitwise(first[1], second[1])


def test_one_token_form_is_the_four_axis_form(small):
    problem, q, _ = small
    want_out, want_lse = problem.decode(q[:, :1])
    out, lse = run(problem, q[:, 0])
    assert out.shape == (4, 4, 8) and out.dtype == BF16
    assert_close(out, want_out[:, 0], atol=5e-6, rtol=2.0**-8)
    assert_close(lse, want_lse[:, 0], atol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_query_is_quantised_as_outside(rng, dtype):
    problem = make_problem(
        rng, [30, 5], num_kv_heads=1, head_dim=32, page_size=16, width=2, dtype=E4M3
    )
    q = rng.normal(0, 3, (2, 3, 4, 32)).astype(dtype)
    q[1, 0, 0] = 0  # amax 0: scale 1

    @jax.jit
    def outside(q):
        scale = fp8.amax_scale(q, axis=-1)
        return fp8.quantize(q, scale[..., None]), scale

    q8, q_scale = outside(jnp.asarray(q))
    inside, inside_lse = run(problem, q)
    ahead, ahead_lse = run(problem, np.asarray(q8), np.asarray(q_scale))
    assert inside.dtype == dtype and ahead.dtype == BF16
    assert_bitwise(inside.astype(jnp.bfloat16), ahead)
    assert_bitwise(inside_lse, ahead_lse)
    want_out, want_lse = problem.decode(np.asarray(q8), np.asarray(q_scale))
    assert_close(ahead, want_out, atol=5e-6, rtol=2.0**-8)
    assert_close(ahead_lse, want_lse, atol=1e-5)


def test_splits_and_schedule_leave_the_value(small):
    problem, q, run_small = small
    want, _ = run_small(problem, q)
    assert_bitwise(run(problem, q, num_splits="static")[0], want)
    schedule = schedule_for(operands_of(problem, q), window=20)
    assert_bitwise(run(problem, q, schedule=schedule)[0], want)


def test_vmap_folds_into_the_batch(small):
    """The page table shared, queries and lengths mapped over axes of their own."""
    problem, q, run_small = small
    want, want_lse = run_small(problem, q)
    _, k_pages, v_pages, table, lens = operands_of(problem, q)

    def one(q, lens):
        return decode_attention(q, k_pages, v_pages, table, lens, window=20, return_lse=True)

    other = np.zeros_like(q)
    both = jnp.stack([jnp.asarray(other), jnp.asarray(q)], axis=1)
    out, lse = jax.jit(jax.vmap(one, in_axes=(1, 0)))(both, jnp.stack([lens, lens]))
    assert_close(out[1], want, rtol=2.0**-8)
    assert_close(lse[1], want_lse, atol=1e-5)


def test_vmap_refuses_what_cannot_fold(small):
    problem, q, _ = small
    args = operands_of(problem, q)
    first, k_pages, *rest = args
    with pytest.raises(NotImplementedError, match="vmap over argument 'k_pages'"):
        jax.vmap(lambda k: decode_attention(first, k, *rest))(jnp.stack([k_pages] * 2))
    with_schedule = functools.partial(decode_attention, schedule=schedule_for(args))
    with pytest.raises(NotImplementedError, match="pass schedule=None inside vmap"):
        jax.vmap(lambda q: with_schedule(q, k_pages, *rest))(jnp.stack([first] * 2))


@pytest.mark.parametrize(
    ("shapes", "want"),
    [
        ({"B": 0}, (0, 1, 2, 8)),
        ({"P": 0}, (2, 1, 2, 8)),
        ({"M": 0}, (2, 1, 2, 8)),
    ],
    ids=["no-sequence", "no-page", "no-table"],
)
def test_empty_sizes(shapes, want):
    sizes = {"B": 2, "P": 3, "M": 2, **shapes}
    pages = jnp.ones((sizes["P"], 1, 16, 8))
    out, lse = decode_attention(
        jnp.ones((sizes["B"], 1, 2, 8)),
        pages,
        pages,
        jnp.zeros((sizes["B"], sizes["M"]), jnp.int32),
        jnp.full(sizes["B"], 5, jnp.int32),
        return_lse=True,
    )
    assert out.shape == want and np.all(np.asarray(out) == 0)
    assert np.all(np.isneginf(np.asarray(lse)))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_shapes_of_models(model):
    """Every model's heads are taken, with queries for verification and its own options."""
    cache = jax.ShapeDtypeStruct((9, model.num_kv_heads, 64, model.head_dim), jnp.bfloat16)
    out, lse = jax.eval_shape(
        functools.partial(
            decode_attention, window=model.window, logit_cap=model.logit_cap, return_lse=True
        ),
        jax.ShapeDtypeStruct((5, 4, model.num_q_heads, model.head_dim), jnp.bfloat16),
        cache,
        cache,
        jax.ShapeDtypeStruct((5, 3), jnp.int32),
        jax.ShapeDtypeStruct((5,), jnp.int32),
        sinks=jax.ShapeDtypeStruct((model.num_q_heads,), jnp.float32) if model.sinks else None,
    )
    assert out.shape == (5, 4, model.num_q_heads, model.head_dim) and out.dtype == BF16
    assert lse.shape == (5, 4, model.num_q_heads) and lse.dtype == F32


def test_blocks_that_are_read():
    """Of blocks of 512 tokens: from the first query's window to the longest sequence's end."""

    def blocks(lens: list[int], q_len: int, window: int | None) -> tuple[int, int]:
        positions = query_positions(jnp.asarray(lens, jnp.int32), q_len)
        first, end = xla.block_range(positions, window, tokens=512, blocks=4)
        return int(first), int(end)

    assert blocks([1100, 0, 600], 2, None) == (0, 3)
    assert blocks([1100, 0, 1100], 2, 588) == (0, 3)  # the second query alone starts at 512
    assert blocks([1100, 0, 1100], 2, 587) == (1, 3)
    assert blocks([512, 513], 1, 1) == (0, 2)
    assert blocks([5000], 1, None) == (0, 4)  # no further than the table
    first, end = blocks([0, 0], 1, 10)
    assert first >= end


def test_wide_table_costs_neither_memory_nor_time():
    """A table 64 blocks wide with one in use: the XLA form gathers a block at a time."""
    pages = jnp.zeros((4, 1, 16, 8), jnp.float32)
    table = jnp.zeros((1, 2048), jnp.int32)
    q = jnp.zeros((1, 1, 1, 8), jnp.float32)
    compiled: Any = (
        jax.jit(decode_attention)
        .lower(q, pages, pages, table, jnp.full(1, 100, jnp.int32))
        .compile()
    )
    whole_cache = 2048 * 16 * 8 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < whole_cache / 4
