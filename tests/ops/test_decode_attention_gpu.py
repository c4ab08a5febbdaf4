"""The decode_attention and decode_schedule kernels on a GPU: truth, edges, bits, graphs."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import fp8, profiling
from jax_hpc.decode import DecodeState, make_decode_loop, params_of
from jax_hpc.ops.decode_attention import decode_attention, decode_schedule
from jax_hpc.ops.decode_attention.schedule import reference
from jax_hpc.ops.decode_attention.schedule.signature import Operands, Params
from tests.support import tiny_models
from tests.support.attention_bounds import LSE_ERROR, SUM_ERROR
from tests.support.attention_truth import BF16, E4M3, Problem, make_problem
from tests.support.decode_calls import schedule_for
from tests.support.numerics import assert_bitwise, assert_close, cosine

pytestmark = pytest.mark.gpu

F32 = np.dtype(np.float32)
# name: (q dtype, cache dtype, S, G, Hkv, D, N, options); an option that is True is drawn.
CASES: dict[str, tuple[Any, Any, int, int, int, int, int, dict[str, Any]]] = {
    "bf16-tp8": (BF16, BF16, 1, 8, 1, 128, 64, {}),
    "bf16-tp1": (BF16, BF16, 1, 8, 8, 128, 64, {}),
    "bf16-group-1": (BF16, BF16, 1, 1, 4, 128, 16, {}),
    "bf16-group-4-drafts": (BF16, BF16, 4, 4, 2, 128, 32, {"window": 100}),
    "bf16-group-5": (BF16, BF16, 1, 5, 2, 64, 128, {"sinks": True, "window": 128}),
    "bf16-group-6-cap": (BF16, BF16, 2, 6, 1, 128, 128, {"logit_cap": 2.0, "scale": 0.7}),
    "bf16-group-7": (BF16, BF16, 8, 7, 1, 64, 64, {"sinks": True}),
    "bf16-group-12": (BF16, BF16, 1, 12, 1, 128, 64, {}),
    "bf16-group-16-drafts": (BF16, BF16, 8, 16, 1, 128, 64, {"window": 600}),
    "bf16-window-of-one": (BF16, BF16, 3, 8, 1, 64, 16, {"window": 1, "sinks": True}),
    "fp8-tensor": (E4M3, E4M3, 1, 8, 1, 128, 64, {"k_scale": 0.5, "v_scale": 2.0}),
    "fp8-head": (E4M3, E4M3, 2, 4, 2, 64, 16, {"k_scale": "Hkv", "v_scale": "Hkv"}),
    "fp8-token": (E4M3, E4M3, 5, 6, 3, 128, 32, {"k_scale": "P Hkv N", "window": 520}),
    "fp8-token-16": (E4M3, E4M3, 1, 8, 2, 64, 16, {"k_scale": "P Hkv N", "sinks": True}),
    "fp8-bf16-query": (BF16, E4M3, 1, 8, 2, 128, 128, {"v_scale": 0.25}),
    "fp8-bf16-query-drafts": (BF16, E4M3, 8, 16, 1, 128, 64, {"logit_cap": 5.0}),
}


def draw(name: str, rng: np.random.Generator) -> tuple[Problem, np.ndarray, np.ndarray | None]:
    q_dtype, dtype, q_len, group, kv_heads, dim, size, options = CASES[name]
    width = -(-2500 // size)
    lens = [0, 1, 2, q_len, size, size + 1, 63, 64, 65, 511, 512, 513, width * size, 777, 2048]
    problem = make_problem(
        rng, lens, num_kv_heads=kv_heads, head_dim=dim, page_size=size, width=width, dtype=dtype
    )
    heads = group * kv_heads
    problem.options = {
        key: draw_option(key, value, problem, heads, rng) for key, value in options.items()
    }
    # One page of each long sequence is missing from the pool, and two sequences share pages.
    problem.page_table[12, 1] = -1
    problem.page_table[11, 0] = problem.k_pages.shape[0]
    problem.page_table[10, :2] = problem.page_table[13, :2]
    shape = (len(lens), q_len, heads)
    q = rng.normal(0, 2, (*shape, dim)).astype(q_dtype)
    return problem, q, rng.uniform(0.5, 2, shape).astype(F32) if q_dtype == E4M3 else None


def draw_option(key: str, value: Any, problem: Problem, heads: int, rng: Any) -> Any:
    if key == "sinks":
        return rng.normal(0, 2, heads).astype(F32)
    if value == "Hkv":
        return rng.uniform(0.5, 2, problem.k_pages.shape[1]).astype(F32)
    if value == "P Hkv N":
        scale = rng.uniform(0.5, 2, problem.k_pages.shape[:3]).astype(F32)
        unwritten = np.isnan(problem.k_pages.astype(F32)).all(axis=-1)
        return np.where(unwritten, np.float32(np.nan), scale)
    return value


def operands_of(problem: Problem, q: Any) -> Any:
    arrays = [q, problem.k_pages, problem.v_pages, problem.page_table, problem.kv_lens]
    return [jnp.asarray(array) for array in arrays]


@functools.cache
def public(static: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(decode_attention, implementation="cuda", **dict(static)))


def run(problem: Problem, q: Any, q_scale: Any = None, schedule: Any = None, **more: Any) -> Any:
    """Output and log-sum-exp of the kernel."""
    options = {**problem.options, **more, "return_lse": True}
    traced = {key: jnp.asarray(v) for key, v in options.items() if isinstance(v, np.ndarray)}
    if q_scale is not None:
        traced["q_scale"] = jnp.asarray(q_scale)
    static = tuple((key, value) for key, value in options.items() if key not in traced)
    return public(static)(*operands_of(problem, q), schedule, **traced)


def quantized(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = fp8.amax_scale(jnp.asarray(q), axis=-1)
    return np.asarray(fp8.quantize(jnp.asarray(q), scale[..., None])), np.asarray(scale)


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, rng: np.random.Generator) -> None:
    problem, q, q_scale = draw(name, rng)
    cache = problem.k_pages.dtype
    values, scale = (q, q_scale) if q_scale is not None or cache == BF16 else quantized(q)
    want_out, want_lse = problem.decode(values, scale)
    size = np.abs(np.where(np.isfinite(want_lse), want_lse, 0))
    window = problem.options.get("window")
    schedules = [
        schedule_for(operands_of(problem, q), window=window, num_ctas=n) for n in (None, 7)
    ]
    cuts: list[dict[str, Any]] = [{}, *({"schedule": schedule} for schedule in schedules)]
    cuts += [{"num_splits": splits} for splits in ("static", 1, 3)]
    for cut in cuts:
        out, lse = run(problem, q, q_scale, **cut)
        assert out.dtype == BF16 and lse.dtype == F32
        assert_close(lse, want_lse, atol=LSE_ERROR + 1e-6 * size)
        assert_close(out, want_out, atol=SUM_ERROR[cache], rtol=2.0**-8)
        assert cosine(out, want_out) >= 0.99999
        assert np.all(np.asarray(out[0]) == 0) and np.all(np.isneginf(np.asarray(lse[0])))
        assert_bitwise(run(problem, q, q_scale, **cut)[0], out)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "fp8"])
def test_tiny_probabilities(rng: np.random.Generator, dtype: Any) -> None:
    """Scores that fall by 2^-20 and more behind the first, in values that all count."""
    problem = make_problem(
        rng, [4096], num_kv_heads=1, head_dim=128, page_size=64, width=64, dtype=dtype
    )
    q = rng.normal(0, 1, (1, 1, 8, 128)).astype(dtype)
    q_scale = np.geomspace(0.01, 8, 8).astype(F32).reshape(1, 1, 8)
    scale = q_scale if dtype == E4M3 else None
    if dtype == BF16:
        q = (q.astype(F32) * q_scale[..., None]).astype(BF16)
    want_out, want_lse = problem.decode(q, scale)
    out, lse = run(problem, q, scale)
    assert_close(lse, want_lse, atol=LSE_ERROR + 1e-6 * np.abs(want_lse))
    for head in range(8):
        assert cosine(out[0, 0, head], want_out[0, 0, head]) >= 0.9999


@pytest.mark.parametrize(("q_len", "window"), [(1, None), (4, 100), (2, 2**31 - 1)])
@pytest.mark.parametrize(
    ("batch", "heads", "num_ctas"),
    [(1, 8, 264), (5, 1, 1), (64, 8, 264), (1025, 3, 3000), (4096, 1, 264), (65536, 8, 264)],
)
def test_schedule_is_the_definition(
    rng: np.random.Generator, batch: int, heads: int, num_ctas: int, q_len: int, window: int | None
) -> None:
    """Every bit of the jnp form's plan, for short, skewed and absurd lengths, bf16 and fp8."""
    kinds = [
        rng.integers(-3, 9000, batch),
        np.where(rng.random(batch) < 0.02, 100_000, rng.integers(0, 100, batch)),
        rng.integers(0, 2**31 - 1, batch),
    ]
    for kind, kv_dtype in itertools.product(kinds, (BF16, E4M3)):
        lens = jnp.asarray(kind, jnp.int32)
        got = decode_schedule(
            lens,
            num_q_heads=heads,
            num_kv_heads=heads,
            head_dim=128,
            kv_dtype=kv_dtype,
            page_size=64,
            q_len=q_len,
            window=window,
            num_ctas=num_ctas,
            implementation="cuda",
        )
        params = Params(heads, q_len, window, num_ctas, fp8_cache=kv_dtype == E4M3)
        want = jax.jit(reference.decode_schedule, static_argnums=1)(Operands(lens), params)
        for array, truth in zip(jax.tree.leaves(got), want, strict=True):
            assert_bitwise(array, truth)


@pytest.fixture(scope="module")
def small() -> tuple[Problem, np.ndarray]:
    rng = np.random.default_rng(7)
    problem = make_problem(
        rng, [140, 0, 17, 333], num_kv_heads=2, head_dim=64, page_size=16, width=24, dtype=BF16
    )
    problem.options = {"window": 70}
    return problem, rng.normal(0, 1, (4, 2, 8, 64)).astype(BF16)


def test_nan_query_stays_in_its_row(small: Any) -> None:
    problem, q = small
    clean = jax.tree.map(np.asarray, run(problem, q))
    dirty_q = q.copy()
    dirty_q[2, 1, 3] = np.nan
    dirty = jax.tree.map(np.asarray, run(problem, dirty_q))
    keep = np.ones(q.shape[:3], bool)
    keep[2, 1, 3] = False
    assert np.isnan(dirty[0][2, 1, 3].astype(F32)).all() and np.isnan(dirty[1][2, 1, 3])
    assert_bitwise(dirty[0][keep], clean[0][keep])
    assert_bitwise(dirty[1][keep], clean[1][keep])


@pytest.mark.parametrize("what", ["k_pages", "v_pages"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poisoned_newest_token_reaches_only_who_sees_it(
    small: Any, what: str, poison: float
) -> None:
    problem, q = small
    clean = jax.tree.map(np.asarray, run(problem, q))
    page = problem.page_table[0, 139 // 16]
    pages = getattr(problem, what)
    saved = pages[page, :, 139 % 16].copy()
    pages[page, 0, 139 % 16] = poison
    dirty = jax.tree.map(np.asarray, run(problem, q))
    pages[page, :, 139 % 16] = saved
    reached = np.zeros(q.shape[:3], bool)
    reached[0, 1, :4] = True  # the second query, the heads of KV head 0
    assert not np.isfinite(dirty[0][reached].astype(F32)).all(axis=-1).any()
    assert_bitwise(dirty[0][~reached], clean[0][~reached])


def test_out_of_window_pages_may_be_gone(small: Any) -> None:
    problem, q = small
    clean = np.asarray(run(problem, q)[0])
    saved = problem.page_table.copy()
    problem.page_table[3, :16] = -1
    gone = np.asarray(run(problem, q)[0])
    problem.page_table[:] = saved
    assert_bitwise(gone, clean)


def test_splits_do_not_depend_on_the_batch(rng: np.random.Generator) -> None:
    problem = make_problem(
        rng,
        [700, 3000, 64, 1],
        num_kv_heads=2,
        head_dim=128,
        page_size=64,
        width=50,
        dtype=BF16,
    )
    q = rng.normal(0, 1, (4, 1, 16, 128)).astype(BF16)
    together, lse = run(problem, q, num_splits=4)
    for b in range(4):
        alone = Problem(
            problem.k_pages,
            problem.v_pages,
            problem.page_table[b : b + 1, : 48 + b % 2],
            problem.kv_lens[b : b + 1],
        )
        out, own_lse = run(alone, q[b : b + 1], num_splits=4)
        assert_bitwise(out[0], together[b])
        assert_bitwise(own_lse[0], lse[b])


def test_splits_do_not_depend_on_what_a_cta_did_before(rng: np.random.Generator) -> None:
    """More pieces than CTAs: a task begins with either team of warps, by the tasks before it."""
    lens = rng.integers(1, 900, 150)
    problem = make_problem(
        rng, lens.tolist(), num_kv_heads=2, head_dim=128, page_size=64, width=15, dtype=BF16
    )
    q = rng.normal(0, 1, (len(lens), 1, 8, 128)).astype(BF16)
    together, lse = run(problem, q, num_splits=2)
    for b in range(100, 110):
        one = slice(b, b + 1)
        alone = Problem(
            problem.k_pages, problem.v_pages, problem.page_table[one], problem.kv_lens[one]
        )
        out, own_lse = run(alone, q[one], num_splits=2)
        assert_bitwise(out[0], together[b])
        assert_bitwise(own_lse[0], lse[b])


def test_query_is_quantised_as_outside(rng: np.random.Generator) -> None:
    problem = make_problem(
        rng, [300, 5], num_kv_heads=1, head_dim=128, page_size=16, width=20, dtype=E4M3
    )
    q = rng.normal(0, 3, (2, 3, 4, 128)).astype(BF16)
    q[1, 0, 0] = 0  # amax 0: scale 1
    inside, inside_lse = run(problem, q)
    ahead, ahead_lse = run(problem, *quantized(q))
    assert_bitwise(inside, ahead)
    assert_bitwise(inside_lse, ahead_lse)


def test_in_a_loop_as_eagerly(small: Any) -> None:
    """Command buffers, with a schedule of each step: the same bits as eager calls."""
    problem, q = small
    q, k_pages, v_pages, table, lens = operands_of(problem, q)

    def step(i: Any, lens: jax.Array) -> jax.Array:
        lens = lens + i
        schedule = schedule_for((q, k_pages, v_pages, table, lens), num_ctas=None)
        return decode_attention(q, k_pages, v_pages, table, lens, schedule, implementation="cuda")

    @jax.jit
    def loop(lens: jax.Array) -> jax.Array:
        def body(i: Any, outs: jax.Array) -> jax.Array:
            return outs.at[i].set(step(i, lens))

        return jax.lax.fori_loop(0, 5, body, jnp.zeros((5, *q.shape), q.dtype))

    outs = loop(lens)
    for i in range(5):
        assert_bitwise(outs[i], step(i, lens))


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "fp8"])
def test_the_decode_loop_of_a_model_runs_it_on_the_cache_itself(dtype: Any) -> None:
    """One schedule for both layers, no copy of a cache, no host."""
    model = tiny_models.qwen3_moe(jnp.bfloat16, head_dim=64)
    table = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    state = DecodeState.create(table, jnp.full(2, 64, jnp.int32))
    cache = model.new_cache(4096, 16, dtype)
    compiled = make_decode_loop(model, 4).lower(params_of(model), cache, state).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="jax_hpc.decode_schedule.v1"') == 1
    assert text.count('custom_call_target="jax_hpc.decode_attention.v1"') == 2
    assert profiling.cache_copies(compiled, jax.tree.leaves(cache)) == []
    assert profiling.host_transfers(compiled) == []
    assert profiling.loops_without_trip_count(compiled) == []
