"""Prefill and the decode loop: consistency, padding, ends, and what the compiled loop does."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_hpc import decode, nn, profiling
from jax_hpc.cache import PagedKVCache
from jax_hpc.decode import NO_TOKEN, DecodeState, PrefillChunk, make_decode_loop, make_prefill
from jax_hpc.sampling import SamplingParams, TokenCounts
from tests.support import tiny_models
from tests.support.numerics import assert_bitwise

PAGE = 16
STEPS = 5


@functools.cache
def model() -> Any:
    return tiny_models.qwen3_moe()


@functools.cache
def prefill_fn() -> Any:
    return make_prefill(model())


@functools.cache
def loop_fn(steps: int = STEPS, early_exit: bool = False) -> Any:
    return make_decode_loop(model(), steps, early_exit=early_exit)


@pytest.mark.parametrize(
    ("backend", "format", "expected"),
    [
        ("gpu", "fp8_tensor", {"xla_gpu_enable_triton_gemm": False}),
        ("gpu", "dense", {}),
        ("cpu", "fp8_tensor", {}),
    ],
)
def test_fp8_linears_are_compiled_without_triton(monkeypatch, backend, format, expected) -> None:
    layer = nn.GatedMLP(16, 32, rngs=nnx.Rngs(0), format=format)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    options = decode.compiler_options(layer)
    assert options == expected
    monkeypatch.undo()
    graph, params = nnx.split(layer)
    run = jax.jit(lambda params, x: nnx.merge(graph, params)(x))
    run.lower(params, jnp.ones((2, 16))).compile(options)  # XLA knows the name


def prompts(rng: np.random.Generator, lengths: tuple[int, ...]) -> list[list[int]]:
    return [rng.integers(0, 96, n).tolist() for n in lengths]


BATCH = 3  # one batch size for all tests: one compilation each of prefill and loop
PAGES = 4


def new_state(limit: int = 64, **kwargs: Any) -> DecodeState:
    table = np.arange(BATCH * PAGES, dtype=np.int32).reshape(BATCH, PAGES)[:, ::-1]
    return DecodeState.create(jnp.asarray(table), jnp.full(BATCH, limit, jnp.int32), **kwargs)


def new_cache() -> Any:
    return model().new_cache(BATCH * PAGES, PAGE)


def chunk(parts: list[list[int]], completes: list[bool], rows: int = 32) -> PrefillChunk:
    """Prompt parts laid one after the other, with a gap of padding rows in front."""
    tokens, starts, at = np.full(rows, 5, np.int32), [], 2
    for part in parts:
        tokens[at : at + len(part)] = part
        starts.append(at)
        at += len(part)
    return PrefillChunk(
        jnp.asarray(tokens),
        jnp.asarray(starts, jnp.int32),
        jnp.asarray([len(p) for p in parts], jnp.int32),
        jnp.asarray(completes),
    )


def start(given: list[list[int]], **kwargs: Any) -> tuple[np.ndarray, Any, DecodeState]:
    """Prefill prompts in one chunk: first tokens, cache, state. Missing prompts stay empty."""
    parts = given + [[]] * (BATCH - len(given))
    completes = [bool(p) for p in parts]
    tokens, cache, state = prefill_fn()(
        decode.params_of(model()), new_cache(), new_state(**kwargs), chunk(parts, completes)
    )
    return np.asarray(tokens), cache, state


def generate(given: list[list[int]], **kwargs: Any) -> np.ndarray:
    """First tokens and STEPS more: [STEPS + 1, B]."""
    first, cache, state = start(given, **kwargs)
    tokens, _, _ = loop_fn()(decode.params_of(model()), cache, state)
    return np.concatenate([first[None], np.asarray(tokens)])


def test_decoding_equals_prefilling_everything(rng: np.random.Generator) -> None:
    """Each greedy token of the loop is the one a prefill of the whole text so far gives."""
    given = prompts(rng, (7, 1, 15))
    got = generate(given)
    texts = [list(p) for p in given]
    for step in range(3):
        first, _, _ = start(texts)
        assert_bitwise(got[step], first)
        for row, token in zip(texts, got[step], strict=True):
            row.append(int(token))


def test_a_sequence_does_not_depend_on_its_batch(rng: np.random.Generator) -> None:
    given = prompts(rng, (5, 9, 3))
    temperature, top_k, seeds = (0.0, 0.9, 1.3), (0, 20, 0), (3, 11, 7)

    def run(order: list[int]) -> np.ndarray:
        return generate(
            [given[i] for i in order],
            sampling=SamplingParams.create(
                BATCH,
                temperature=[temperature[i] for i in order],
                top_k=[top_k[i] for i in order],
            ),
            seeds=jnp.asarray([seeds[i] for i in order], jnp.uint32),
        )

    order = [2, 0, 1]
    assert_bitwise(run(order), run([0, 1, 2])[:, order])


def test_prefill_in_chunks_equals_prefill_at_once(rng: np.random.Generator) -> None:
    given = prompts(rng, (11, 6))
    whole, whole_cache, whole_state = start(given)
    params, state, cache = decode.params_of(model()), new_state(), new_cache()
    one = chunk([given[0][:4], given[1], []], [False, True, False])
    two = chunk([given[0][4:], [], []], [True, False, False])
    first, cache, state = prefill_fn()(params, cache, state, one)
    np.testing.assert_array_equal(first, [NO_TOKEN, whole[1], NO_TOKEN])
    np.testing.assert_array_equal(state.finished, [True, False, True])
    second, cache, state = prefill_fn()(params, cache, state, two)
    np.testing.assert_array_equal(second, [whole[0], NO_TOKEN, NO_TOKEN])
    np.testing.assert_array_equal(state.tokens, whole_state.tokens)
    np.testing.assert_array_equal(state.kv_lens, [11, 6, 0])
    for got, want in zip(jax.tree.leaves(cache), jax.tree.leaves(whole_cache), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_chunk_that_completes_nothing_computes_no_logits(rng: np.random.Generator) -> None:
    given = prompts(rng, (9, 4))
    sampling = SamplingParams.create(BATCH, temperature=0.8, repetition_penalty=1.2)
    counts = TokenCounts.from_prompts([*given, []], 96)
    whole, _, whole_state = start(given, sampling=sampling, counts=counts)
    params, cache = decode.params_of(model()), new_cache()
    state = new_state(sampling=sampling, counts=counts)
    for cut, completes, want in [
        ([given[0][:5], [], []], [False] * 3, [NO_TOKEN] * 3),
        ([[], given[1][:1], []], [False] * 3, [NO_TOKEN] * 3),
        ([given[0][5:], given[1][1:], []], [True, True, False], whole),
    ]:
        tokens, cache, state = prefill_fn()(params, cache, state, chunk(cut, completes))
        np.testing.assert_array_equal(tokens, want)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(whole_state), strict=True):
        np.testing.assert_array_equal(got, want)

    part = chunk([[1], [2], []], [False] * 3)
    traced = jax.make_jaxpr(prefill_fn())(params, cache, state, part)
    (call,) = traced.eqns
    made = {
        eqn.primitive.name: {v.aval.shape for v in eqn.outvars}
        for eqn in call.params["jaxpr"].eqns
        if any(v.aval.shape == (BATCH, 96) and v.aval.dtype == jnp.float32 for v in eqn.outvars)
    }
    assert made == {}, "logits outside the cond"
    compiled = prefill_fn().lower(params, cache, state, part).compile()
    assert profiling.host_transfers(compiled) == []
    assert profiling.cache_copies(compiled, jax.tree.leaves(cache)) == []


def test_finished_rows_touch_nothing_and_emit_nothing(rng: np.random.Generator) -> None:
    given = prompts(rng, (4, 8))
    _, cache, state = start(given)
    state = dataclasses.replace(state, finished=jnp.array([False, True, True]))
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(cache)]
    pages_of_others = np.asarray(state.page_table)[1:].ravel()
    lens = np.asarray(state.kv_lens)
    tokens, cache, after = loop_fn()(decode.params_of(model()), cache, state)
    assert (np.asarray(tokens)[:, 1:] == NO_TOKEN).all()
    assert (np.asarray(tokens)[:, 0] != NO_TOKEN).all()
    np.testing.assert_array_equal(after.kv_lens, lens + [STEPS, 0, 0])
    for old, new in zip(before, jax.tree.leaves(cache), strict=True):
        assert_bitwise(np.asarray(new)[pages_of_others], old[pages_of_others])


def test_ends_by_eos_limit_and_capacity(rng: np.random.Generator) -> None:
    given = prompts(rng, (6, 6, 6))
    free = generate(given)
    # Row 0 ends at the token of step 2, row 1 by its limit after 4 tokens, row 2 runs on.
    eos = jnp.full((BATCH, 1), NO_TOKEN, jnp.int32).at[0].set(int(free[2, 0]))
    first, cache, state = start(given, eos_ids=eos)
    state = dataclasses.replace(state, limits=jnp.array([64, 10, 64], jnp.int32))
    tokens, _, state = loop_fn()(decode.params_of(model()), cache, state)
    got = np.concatenate([first[None], np.asarray(tokens)])
    ends = int(np.argmax(free[:, 0] == free[2, 0])) + 1
    want = free.copy()
    want[ends:, 0] = NO_TOKEN
    want[4:, 1] = NO_TOKEN
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(state.finished, [True, True, False])


def test_a_full_table_ends_the_sequence(rng: np.random.Generator) -> None:
    """One page of 16 tokens: 16 tokens fit, the 17th is emitted and never stored."""
    table = jnp.full((BATCH, PAGES), -1, jnp.int32).at[0, 0].set(7)
    state = dataclasses.replace(new_state(limit=1000), page_table=table)
    params = decode.params_of(model())
    parts = [*prompts(rng, (13,)), [], []]
    tokens = chunk(parts, [True, False, False])
    _, cache, state = prefill_fn()(params, new_cache(), state, tokens)
    emitted, _, state = loop_fn()(params, cache, state)
    assert (np.asarray(emitted)[:, 0] != NO_TOKEN).tolist() == [True, True, True, False, False]
    assert state.finished[0] and state.kv_lens[0] == 16


def test_the_models_positions_end_a_sequence(rng: np.random.Generator) -> None:
    """No token is fed back, or sampled, beyond them, whatever the limits say."""
    short = tiny_models.qwen3_moe(num_layers=1, sparse_layers=(True,), max_positions=12)
    params, cache = decode.params_of(short), short.new_cache(BATCH * PAGES, PAGE)
    given = prompts(rng, (9, 11, 3))
    first, cache, state = make_prefill(short)(
        params, cache, new_state(limit=1000), chunk(given, [True] * 3)
    )
    np.testing.assert_array_equal(state.finished, [False, True, False])
    tokens, _, state = make_decode_loop(short, STEPS)(params, cache, state)
    emitted = np.concatenate([np.asarray(first)[None], tokens]) != NO_TOKEN
    np.testing.assert_array_equal(emitted.sum(axis=0), [12 - 9, 12 - 11, STEPS + 1])
    np.testing.assert_array_equal(state.finished, [True, True, False])
    np.testing.assert_array_equal(state.kv_lens, [11, 11, 3 + STEPS])


def test_early_exit_gives_the_same_tokens_and_stops(rng: np.random.Generator) -> None:
    given = prompts(rng, (6, 3, 5))
    params = decode.params_of(model())
    outcome = []
    for early_exit in (False, True):
        _, cache, state = start(given, limit=7)
        outcome.append(loop_fn(STEPS, early_exit)(params, cache, state)[0])
    assert_bitwise(outcome[0], outcome[1])
    assert (np.asarray(outcome[1])[3:] == NO_TOKEN).all()


def test_penalties_see_prompt_and_output(rng: np.random.Generator) -> None:
    """An unbounded repetition penalty never lets a token come twice."""
    given = prompts(rng, (6, 9, 2))
    sampling = SamplingParams.create(BATCH, temperature=0.0, repetition_penalty=1e9)
    counts = TokenCounts.from_prompts(given, 96)
    got = generate(given, sampling=sampling, counts=counts)
    for row, prompt in enumerate(given):
        seen = prompt + got[:, row].tolist()
        assert len(set(got[:, row].tolist())) == STEPS + 1
        assert not set(seen[: len(prompt)]) & set(got[:, row].tolist())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bf16"])
def test_the_compiled_loop_copies_no_cache_and_needs_no_host(dtype: Any) -> None:
    big = tiny_models.qwen3_moe(dtype)
    state = new_state()
    cache = big.new_cache(4096, PAGE)  # larger than a library's workspace on a GPU
    compiled = make_decode_loop(big, 4).lower(decode.params_of(big), cache, state).compile()
    leaves = jax.tree.leaves(cache)
    assert profiling.cache_copies(compiled, leaves) == []
    assert profiling.host_transfers(compiled) == []
    assert '"known_trip_count":{"n":"4"}' in compiled.as_text()
    if jax.default_backend() != "cpu":
        # Some XLA forms count their work on a CPU, where a loop's predicate is at hand.
        assert profiling.loops_without_trip_count(compiled) == []
    cache_bytes = sum(leaf.nbytes for leaf in leaves)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes


def test_the_cache_keeps_its_address(rng: np.random.Generator) -> None:
    _, cache, state = start(prompts(rng, (4, 8)))
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    _, cache, _ = loop_fn()(decode.params_of(model()), cache, state)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)] == before


def test_the_copy_finder_finds_copies() -> None:
    """A test that finds nothing must be able to find something."""
    cache = jnp.zeros((512, 2, 16, 32))

    def doubled(cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        return cache.at[3, :, 2].set(1.0), cache[:, ::-1]

    compiled = jax.jit(doubled).lower(cache).compile()
    assert profiling.cache_copies(compiled, [cache])
    waits = jax.jit(lambda x: jax.lax.while_loop(lambda v: v[0] < 3, lambda v: v + 1, x))
    assert profiling.loops_without_trip_count(waits.lower(jnp.zeros(2)).compile())

    def notify(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: None, x)
        return x + 1

    assert profiling.host_transfers(jax.jit(notify).lower(jnp.zeros(2)).compile())


def test_state_checks() -> None:
    table, limits = jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"DecodeState.create: argument 'limits' must have shape"):
        DecodeState.create(table, jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match="'page_table' must be int32, got float32"):
        DecodeState.create(table.astype(jnp.float32), limits)
    with pytest.raises(ValueError, match="make_decode_loop: argument 'num_steps' must be >= 1"):
        make_decode_loop(model(), 0)
    with pytest.raises(TypeError, match="'num_steps' must be a Python int .* got 2.0"):
        make_decode_loop(model(), 2.0)  # pyright: ignore[reportArgumentType]


def test_a_chunk_or_a_cache_of_another_batch_or_model_is_named() -> None:
    params, cache, state = decode.params_of(model()), new_cache(), new_state()
    good = chunk([[1], [2], [3]], [True] * 3)
    for change, error, words in [
        ({"q_lens": jnp.ones(2, jnp.int32)}, ValueError, r"'chunk.q_lens' .* B = 3 from 'state"),
        ({"completes": jnp.ones(3, jnp.int32)}, TypeError, "'chunk.completes' must be bool"),
        ({"tokens": jnp.ones((3, 2), jnp.int32)}, ValueError, r"'chunk.tokens' .* \[T\]"),
    ]:
        with pytest.raises(error, match=f"prefill: argument {words}"):
            prefill_fn()(params, cache, state, dataclasses.replace(good, **change))
    fewer = PagedKVCache(cache.layers[:1])
    with pytest.raises(ValueError, match="Qwen3MoE: argument 'cache' must be of 2 layers, got 1"):
        prefill_fn()(params, fewer, state, good)
