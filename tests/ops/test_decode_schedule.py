"""decode_schedule: every tile once, balanced, in few slots; and an attention that runs on it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_hpc.ops.decode_attention import DecodeSchedule, decode_attention, decode_schedule
from jax_hpc.ops.decode_attention.cases import BASELINE_HEADS, BASELINE_MIXES
from jax_hpc.ops.decode_attention.schedule import heuristics
from jax_hpc.ops.decode_attention.schedule.heuristics import (
    EMPTY_COST,
    MIN_CTA_COST,
    TILE_COST,
    TILE_TOKENS,
    WHOLE_TILES,
    task_cost,
)
from tests.support.attention_truth import make_problem
from tests.support.numerics import assert_close

FIXED = {"head_dim": 128, "kv_dtype": jnp.bfloat16, "page_size": 64}
BATCHES = (1, 5, 64)  # static shapes: each one is a compilation


def build(lens: np.ndarray, num_kv_heads: int = 1, **options: Any) -> DecodeSchedule:
    made = decode_schedule(
        jnp.asarray(lens, jnp.int32),
        num_q_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        **{**FIXED, **options},
    )
    return jax.tree.map(np.asarray, made)


def is_fp8(schedule: DecodeSchedule) -> bool:
    return schedule.kv_dtype == "float8_e4m3fn"


def tiles_of(length: int, q_len: int = 1, window: int | None = None) -> tuple[int, int]:
    """First and end tile of the keys that some query sees, by definition."""
    length = max(int(length), 0)
    lowest = 0 if window is None else max(length - q_len - window + 1, 0)
    return lowest // TILE_TOKENS, -(-length // TILE_TOKENS)


@dataclasses.dataclass
class Piece:
    cta: int
    pair: int
    first: int  # tile, counted from the pair's first
    end: int
    tiles: int  # of the whole pair

    @property
    def slot(self) -> int | None:
        if (self.first, self.end) == (0, self.tiles):
            return None
        return 2 * self.cta + (self.first == 0)


def walk(schedule: DecodeSchedule, lens: np.ndarray) -> list[Piece]:
    """What each CTA does, as a persistent kernel would read its span."""
    pieces = []
    for cta in range(schedule.num_ctas):
        pair, first = int(schedule.span_pair[cta]), int(schedule.span_tile[cta])
        stop = int(schedule.span_pair[cta + 1]), int(schedule.span_tile[cta + 1])
        while (pair, first) < stop:
            start, end = tiles_of(
                lens[pair // schedule.num_kv_heads], schedule.q_len, schedule.window
            )
            last = stop[1] if pair == stop[0] else end - start
            pieces.append(Piece(cta, pair, first, last, end - start))
            pair, first = pair + 1, 0
    return pieces


def check_invariants(schedule: DecodeSchedule, lens: np.ndarray) -> None:
    num_ctas, heads = schedule.num_ctas, schedule.num_kv_heads
    pieces = walk(schedule, lens)
    task = task_cost(fp8_cache=is_fp8(schedule))
    covered: dict[int, int] = {}
    costs = np.zeros(num_ctas)
    slots = []
    parts: dict[int, list[Piece]] = {}
    for piece in pieces:
        # Pieces in order of CTA continue where the last one of the pair ended.
        assert covered.get(piece.pair, 0) == piece.first, piece
        assert piece.end > piece.first or piece.tiles == 0, piece
        covered[piece.pair] = piece.end
        count = piece.end - piece.first
        costs[piece.cta] += count * TILE_COST + task if count else EMPTY_COST
        if piece.slot is not None:
            slots.append(piece.slot)
            parts.setdefault(piece.pair, []).append(piece)
    axis = 0
    for pair in range(len(lens) * heads):
        start, end = tiles_of(lens[pair // heads], schedule.q_len, schedule.window)
        axis += (end - start) * TILE_COST + task if end > start else EMPTY_COST
        assert covered.pop(pair) == end - start, f"pair {pair}"
    assert not covered
    assert len(set(slots)) == len(slots) and all(0 <= s < 2 * num_ctas for s in slots)
    check_merges(schedule, parts)
    most = max((piece.tiles for piece in pieces), default=0)
    check_balance(costs, axis, is_fp8(schedule), cut=most > WHOLE_TILES)


def check_merges(schedule: DecodeSchedule, parts: dict[int, list[Piece]]) -> None:
    """merge_last finds exactly the slots of each cut pair, in order."""
    found = {}
    for cta, last in enumerate(schedule.merge_last):
        if last >= 0:
            slots = [2 * cta + 1, *range(2 * (cta + 1), 2 * int(last) + 1, 2)]
            found[int(schedule.span_pair[cta + 1])] = slots
    assert found == {pair: [p.slot for p in pieces] for pair, pieces in parts.items()}


def check_balance(costs: np.ndarray, axis: int, fp8: bool, cut: bool) -> None:
    """The fullest CTA is within one task of the mean; axis is the cost before any pair is cut."""
    start = task_cost(fp8_cache=fp8)
    task = start + TILE_COST
    if not cut:  # within the largest pair
        task = start + WHOLE_TILES * TILE_COST
    working = int(np.clip(axis // MIN_CTA_COST, 1, len(costs)))
    mean = costs.sum() / working
    assert costs.max() <= mean + task + 1, (costs.max(), mean)
    if not cut:
        return  # spans may be empty
    # A CTA that continues a pair pays one more start, which raises the mean but not the others.
    assert np.sort(costs)[-working] >= mean - task - start - 1, (costs, mean)


LENGTHS = st.one_of(
    st.just(0),
    st.integers(-3, 70),
    st.integers(0, 5000),
    st.sampled_from([63, 64, 65, 4096, 131072, 131073]),
)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("batch", BATCHES)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_batches(batch, window, data):
    lens = np.array(data.draw(st.lists(LENGTHS, min_size=batch, max_size=batch)), np.int32)
    heads, q_len, num_ctas = {1: (8, 1, 264), 5: (1, 4, 7), 64: (2, 1, 132)}[batch]
    schedule = build(lens, heads, q_len=q_len, window=window, num_ctas=num_ctas)
    check_invariants(schedule, lens)


@pytest.mark.parametrize("num_ctas", [1, 2, 1000])
def test_any_number_of_ctas(rng, num_ctas):
    lens = rng.integers(0, 3000, 64).astype(np.int32)
    check_invariants(build(lens, 2, num_ctas=num_ctas), lens)


def test_large_batch(rng):
    lens = rng.integers(0, 9000, 4096).astype(np.int32)
    lens[rng.random(4096) < 0.3] = 0
    check_invariants(build(lens, num_ctas=264), lens)


def test_one_long_sequence_among_65536(rng):
    lens = np.zeros(65536, np.int32)
    lens[rng.integers(0, 65536)] = 131072
    lens[rng.integers(0, 65536, 500)] = 64
    schedule = build(lens, num_ctas=528)
    check_invariants(schedule, lens)
    assert np.diff(schedule.span_pair).max() < 2000  # the empty rows are shared out as well


def test_axis_longer_than_int32(rng):
    # 65,536 sequences x 8 heads of up to 2^31 - 1 tokens: 2^44 tiles.
    lens = rng.integers(0, 2**31, 65536).astype(np.int32)
    lens[:3] = 2**31 - 1, 0, 1
    check_long(build(lens, 8, num_ctas=528), lens)
    check_long(build(np.full(65536, 131072), 8, num_ctas=528), np.full(65536, 131072))


def check_long(schedule: DecodeSchedule, lens: np.ndarray) -> None:
    """Balance and order, without walking half a million pairs."""
    tiles = np.repeat(-(-lens.astype(np.int64) // TILE_TOKENS), schedule.num_kv_heads)
    task = task_cost(fp8_cache=False)
    before = np.append(0, np.cumsum(np.where(tiles, tiles * TILE_COST + task, EMPTY_COST)))
    pair, tile = schedule.span_pair.astype(np.int64), schedule.span_tile.astype(np.int64)
    assert (pair[0], tile[0]) == (0, 0) and (pair[-1], tile[-1]) == (len(tiles), 0)
    assert np.all(tile[:-1] < np.maximum(tiles[pair[:-1]], 1)) and np.all(tile >= 0)
    at = before[pair] + tile * TILE_COST
    spans = np.diff(at)
    assert_close(spans, np.full(len(spans), before[-1] / len(spans)), rtol=1e-3)


def test_length_near_2_31_with_window():
    lens = np.array([2**31 - 1, 2**31 - 64, 100], np.int32)
    check_invariants(build(lens, q_len=8, window=2**31 - 1, num_ctas=1), lens)
    check_invariants(build(lens, q_len=8, window=1000, num_ctas=13), lens)


@pytest.mark.parametrize("heads", BASELINE_HEADS, ids=lambda heads: heads.name)
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=["bf16", "fp8"])
def test_mixes_of_the_baselines(heads, kv_dtype):
    # Padded to one batch size, so that one compilation serves all mixes.
    for mix in BASELINE_MIXES:
        lens = np.zeros(64, np.int32)
        lens[: len(mix.kv_lens)] = mix.kv_lens
        made = build(lens, heads.num_kv_heads, num_ctas=264, kv_dtype=kv_dtype)
        check_invariants(made, lens)


def test_short_pairs_stay_whole():
    short = np.full(64, TILE_TOKENS * WHOLE_TILES)
    schedule = build(short, num_ctas=132)
    assert np.all(schedule.span_tile == 0) and np.all(schedule.merge_last == -1)
    assert np.diff(schedule.span_pair).max() == 1
    check_invariants(schedule, short)
    longer = short + np.eye(64, dtype=int)[7]  # one of them
    assert build(longer, num_ctas=132).merge_last.max() >= 0


def test_floor_on_work_per_cta():
    for tiles in (1, 2, 60):  # one sequence's
        lens = np.array([TILE_TOKENS * tiles])
        pieces = walk(build(lens, num_ctas=132), lens)
        cost = tiles * TILE_COST + task_cost(fp8_cache=False)
        assert len(pieces) == (1 if tiles <= WHOLE_TILES else cost // MIN_CTA_COST)
        # The task's start is part of the first span's work.
        assert all(p.end - p.first >= MIN_CTA_COST // TILE_COST for p in pieces[1:])


def test_empty_batch():
    schedule = build(np.zeros(0, np.int32), num_ctas=4)
    assert schedule.span_pair.tolist() == [0] * 5 and schedule.merge_last.tolist() == [-1] * 4
    schedule = build(np.zeros(5, np.int32), num_ctas=7)
    check_invariants(schedule, np.zeros(5, np.int32))


def test_default_number_of_ctas():
    assert build(np.array([7])).num_ctas == heuristics.num_sms()


@pytest.mark.parametrize(("q_len", "window"), [(1, None), (3, None), (3, 600)])
def test_attention_on_the_schedule(rng, q_len, window):
    """Partials of the spans, merged by log-sum-exp, are the attention."""
    lens = [0, 700, 64, 1, 130, 2, 1023, 65]
    problem = make_problem(
        rng, lens, num_kv_heads=2, head_dim=8, page_size=16, width=64, dtype=np.float32
    )
    problem.options = {"window": window}
    q = rng.normal(0, 1, (len(lens), q_len, 4, 8)).astype(np.float32)
    shapes: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 16}
    schedule = decode_schedule(
        jnp.asarray(problem.kv_lens),
        **shapes,
        kv_dtype=jnp.float32,
        q_len=q_len,
        window=window,
        num_ctas=14,
    )
    assert sum(int(x) >= 0 for x in schedule.merge_last) >= 2
    out, lse = run_schedule(problem, q, jax.tree.map(np.asarray, schedule))
    want_out, want_lse = problem.decode(q)
    assert_close(out, want_out, atol=1e-12)
    assert_close(lse, want_lse, atol=1e-12)
    args: Any = (q, problem.k_pages, problem.v_pages, problem.page_table, problem.kv_lens)
    got = decode_attention(*args, schedule=schedule, window=window)
    assert_close(got, want_out, atol=1e-5)


def run_schedule(problem, q, schedule) -> tuple[np.ndarray, np.ndarray]:
    """A persistent kernel and its combine, in numpy."""
    heads, group = schedule.num_kv_heads, q.shape[2] // schedule.num_kv_heads
    out, lse = np.full(q.shape, np.nan), np.full(q.shape[:3], np.nan)
    slots: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for piece in walk(schedule, problem.kv_lens):
        b, rows = piece.pair // heads, slice(group * (piece.pair % heads), None)
        rows = slice(rows.start, rows.start + group)
        part = partial_attention(problem, q[b], b, piece, schedule)
        if piece.slot is None:
            out[b, :, rows], lse[b, :, rows] = part[0][:, rows], part[1][:, rows]
        else:
            slots[piece.slot] = part[0][:, rows], part[1][:, rows]
    for cta, last in enumerate(schedule.merge_last):
        if last < 0:
            continue
        pair = int(schedule.span_pair[cta + 1])
        b, rows = pair // heads, slice(group * (pair % heads), group * (pair % heads) + group)
        parts = [slots.pop(2 * cta + 1), *(slots.pop(2 * c) for c in range(cta + 1, last + 1))]
        sums = np.stack([p[1] for p in parts])
        merged = np.logaddexp.reduce(sums, axis=0)
        base = np.where(np.isneginf(merged), 0.0, merged)
        weights = np.exp(sums - base)
        out[b, :, rows] = sum(w[..., None] * p[0] for w, p in zip(weights, parts, strict=True))
        lse[b, :, rows] = merged
    assert not slots
    return out, lse


def partial_attention(problem, q, b, piece, schedule) -> tuple[np.ndarray, np.ndarray]:
    """Truth over a piece's keys only: pages outside it are made unreadable."""
    length = int(problem.kv_lens[b])
    start, _ = tiles_of(length, schedule.q_len, schedule.window)
    size = problem.k_pages.shape[2]
    per_tile = TILE_TOKENS // size
    table = np.full_like(problem.page_table[b], -1)
    keep = slice((start + piece.first) * per_tile, (start + piece.end) * per_tile)
    table[keep] = problem.page_table[b, keep]
    part = dataclasses.replace(problem, page_table=table[None], kv_lens=problem.kv_lens[b : b + 1])
    out, lse = part.decode(q[None])
    return out[0], lse[0]


GOOD = {"num_q_heads": 8, "num_kv_heads": 2, **FIXED}
BAD = {
    "page_size": (0, ValueError, "argument 'page_size' must be page_size >= 1, got 0"),
    "q_len": (9, ValueError, "argument 'q_len' must be 1 <= q_len <= 8, got 9"),
    "window": (0, ValueError, "argument 'window' must be window >= 1, got 0"),
    "num_q_heads": (7, ValueError, "in a multiple of Hkv = 2, got Hq = 7"),
    "num_ctas": (0, ValueError, "argument 'num_ctas' must be 1 <= num_ctas"),
    "num_kv_heads": (2.0, TypeError, "argument 'num_kv_heads' must be a Python int"),
    "head_dim": (True, TypeError, "argument 'head_dim' must be a Python int"),
    "kv_dtype": (jnp.float16, TypeError, "bfloat16 or float32 or float8_e4m3fn, got float16"),
    "implementation": ("gpu", ValueError, "must be one of 'auto', 'cuda', 'xla'"),
}


@pytest.mark.parametrize("argument", BAD)
def test_rejects_bad_arguments(argument):
    value, error, words = BAD[argument]
    with pytest.raises(error, match="decode_schedule: ") as caught:
        decode_schedule(jnp.zeros(3, jnp.int32), **{**GOOD, argument: value})
    assert words in str(caught.value)


def test_rejects_bad_lengths():
    with pytest.raises(TypeError, match="'kv_lens' must be int32, got float32"):
        decode_schedule(jnp.zeros(3), **GOOD)
    with pytest.raises(ValueError, match=r"'kv_lens' must have shape \[B\], got \(3, 1\)"):
        decode_schedule(jnp.zeros((3, 1), jnp.int32), **GOOD)
    with pytest.raises(ValueError, match="'kv_lens' must be of B <= 65536, got 65537"):
        decode_schedule(jnp.zeros(65537, jnp.int32), **GOOD)
    with pytest.raises(ValueError, match=r"'num_kv_heads' must be B \* Hkv <= "):
        decode_schedule(
            jnp.zeros(65536, jnp.int32), **{**GOOD, "num_q_heads": 2**14, "num_kv_heads": 2**14}
        )


def test_built_once_in_a_loop_and_under_vmap():
    """Lengths change on the device, the schedule with them; a batch of schedules is refused."""

    @jax.jit
    def loop(lens):
        def step(_, carry):
            lens, _ = carry
            made = decode_schedule(lens, **GOOD, num_ctas=5)
            return lens + 64, made

        start = decode_schedule(lens, **GOOD, num_ctas=5)
        return jax.lax.fori_loop(0, 4, step, (lens, start))[1]

    lens = np.array([100, 0, 900], np.int32)
    schedule = jax.tree.map(np.asarray, loop(jnp.asarray(lens)))
    check_invariants(schedule, lens + 3 * 64)
    with pytest.raises(NotImplementedError, match="decode_schedule: vmap is not supported"):
        jax.vmap(lambda n: decode_schedule(n, **GOOD))(jnp.zeros((2, 3), jnp.int32))
