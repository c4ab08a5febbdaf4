"""Prefill and decode as plain jitted functions: no host in the loop, no copy of the cache.

A :class:`DecodeState` holds everything about a batch of sequences that is not in the cache.
``make_prefill`` and ``make_decode_loop`` return functions of ``(params, cache, state, ...)`` that
give back the cache and the state they were given (donated, updated in place); ``params`` come
from :func:`params_of` and are never copied.

A model is a callable ``(inputs, cache) -> (hidden [T, H], cache)`` on :class:`StepInputs`, with
``logits(hidden [R, H]) -> float32 [R, V]`` and ``config.max_positions``, the positions that it
has: no sequence becomes longer than that, whatever its limit.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_hpc._checks import Dims, check, check_dtype, static_int
from jax_hpc._primitive import vary_alike
from jax_hpc.cache import PagedKVCache, slots_of
from jax_hpc.nn.linear import Linear
from jax_hpc.sampling import SamplingParams, TokenCounts, sample, update_counts
from jax_hpc.step import StepInputs

NO_TOKEN = -1
"""What a finished sequence emits."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch of B sequences between two steps.

    tokens: int32 ``[B]``, the last token of each sequence: sampled, not yet in the cache.
    kv_lens: int32 ``[B]``, tokens in the cache.
    page_table: int32 ``[B, M]``, pages in the order of positions; unassigned entries -1.
    finished: bool ``[B]``, sequences that do not decode: ended, or still without their prompt.
        They cost nothing in a step and emit NO_TOKEN.
    limits: int32 ``[B]``, length (prompt and generated tokens) at which a sequence ends; it
        also ends at the model's ``max_positions``, and where its page table has no page for the
        next token.
    eos_ids: int32 ``[B, n]``, tokens that end a sequence, padded with NO_TOKEN.
    seeds: uint32 ``[B]``; with the position they determine a sequence's random choices.
    sampling: how each sequence samples. counts: tokens seen, None where no penalty is used.
    """

    tokens: jax.Array
    kv_lens: jax.Array
    page_table: jax.Array
    finished: jax.Array
    limits: jax.Array
    eos_ids: jax.Array
    seeds: jax.Array
    sampling: SamplingParams
    counts: TokenCounts | None = None

    @classmethod
    def create(
        cls,
        page_table: jax.Array,
        limits: jax.Array,
        *,
        eos_ids: jax.Array | None = None,
        seeds: jax.Array | None = None,
        sampling: SamplingParams | None = None,
        counts: TokenCounts | None = None,
    ) -> "DecodeState":
        """Sequences whose prompts are still to be prefilled: empty, not decoding.

        Greedy without ``sampling``; never ended by a token without ``eos_ids``; seeds 0 .. B - 1.
        The state holds copies, so that donating it leaves the caller's arrays alone.
        """
        operator = "DecodeState.create"
        dims = Dims(operator)
        dims.match("page_table", page_table, "B M")
        dims.match("limits", limits, "B")
        check_dtype(operator, "page_table", page_table, (jnp.int32,))
        check_dtype(operator, "limits", limits, (jnp.int32,))
        batch = dims["B"]
        if eos_ids is None:
            eos_ids = jnp.full((batch, 1), NO_TOKEN, jnp.int32)
        if seeds is None:
            seeds = jnp.arange(batch, dtype=jnp.uint32)
        dims.match("eos_ids", eos_ids, "B n")
        dims.match("seeds", seeds, "B")
        check_dtype(operator, "eos_ids", eos_ids, (jnp.int32,))
        check_dtype(operator, "seeds", seeds, (jnp.uint32,))
        return cls(
            tokens=jnp.zeros(batch, jnp.int32),
            kv_lens=jnp.zeros(batch, jnp.int32),
            page_table=jnp.copy(page_table),
            finished=jnp.ones(batch, bool),
            limits=jnp.copy(limits),
            eos_ids=jnp.copy(eos_ids),
            seeds=jnp.copy(seeds),
            sampling=jax.tree.map(jnp.copy, sampling or SamplingParams.greedy(batch)),
            counts=jax.tree.map(jnp.copy, counts),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens of one prefill step, ragged over the batch.

    tokens: int32 ``[T]``; sequence b owns rows ``q_starts[b] .. q_starts[b] + q_lens[b]``, which
        continue what its cache holds. Rows of no sequence are padding.
    q_starts, q_lens: int32 ``[B]``; q_lens 0 for sequences without a part in this chunk.
    completes: bool ``[B]``, the sequence's prompt ends here: sample its first token.
    """

    tokens: jax.Array
    q_starts: jax.Array
    q_lens: jax.Array
    completes: jax.Array


Prefill = Callable[
    [Any, PagedKVCache, DecodeState, PrefillChunk],
    tuple[jax.Array, PagedKVCache, DecodeState],
]
DecodeLoop = Callable[
    [Any, PagedKVCache, DecodeState], tuple[jax.Array, PagedKVCache, DecodeState]
]


def params_of(model: nnx.Module) -> nnx.State:
    """The arrays of a model, the first argument of the functions made here."""
    return nnx.split(model)[1]


def compiler_options(model: nnx.Module) -> dict[str, bool]:
    """What to compile a model's functions with: ``lowered.compile(compiler_options(model))``.

    On a GPU XLA tries Triton kernels for every product. For those of fp8 weights
    (:class:`jax_hpc.nn.Linear` with format ``fp8_tensor``) that takes minutes: four layers of Hy3
    did not compile within 95 s, and in 9 s with cuBLASLt's kernels alone (H200, jax 0.11.2;
    ``benchmarks/results/h200/compile_options.txt``). So a model with one such layer is compiled
    without Triton's products, all of them. Empty otherwise.

    The functions made here do not set this themselves: JAX refuses such options on a jit within
    another one, which is where they stand in a caller's own ``jax.shard_map`` or loop.
    """
    if jax.default_backend() != "gpu":
        return {}
    modules = (module for _, module in nnx.iter_graph(model))
    has_fp8 = any(isinstance(m, Linear) and m.format == "fp8_tensor" for m in modules)
    return {"xla_gpu_enable_triton_gemm": False} if has_fp8 else {}


def make_prefill(model: nnx.Module) -> Prefill:
    """A jitted ``(params, cache, state, chunk) -> (tokens int32 [B], cache, state)``.

    ``tokens`` are the first tokens of the sequences that the chunk completes, NO_TOKEN for the
    others; a chunk that completes none computes no logits. The cache and the state are donated.
    One compilation per shape of the chunk.

    A prompt must be shorter than the model's ``max_positions``; only the host can refuse one that
    is not (it would be read with wrong positions, and end with its first token).
    """
    graph = nnx.split(model)[0]

    def prefill(
        params: Any, cache: PagedKVCache, state: DecodeState, chunk: PrefillChunk
    ) -> tuple[jax.Array, PagedKVCache, DecodeState]:
        _check_chunk(state, chunk)
        model: Any = nnx.merge(graph, params)
        page_size = cache.page_size
        inputs = _prefill_inputs(page_size, state, chunk)
        hidden, cache = model(inputs, cache)
        kv_lens = state.kv_lens + chunk.q_lens
        emits = chunk.completes & (chunk.q_lens > 0)
        last = jnp.clip(chunk.q_starts + chunk.q_lens - 1, 0, chunk.tokens.shape[0] - 1)
        rows = hidden[last]
        # Inside shard_map both branches must vary over the same mesh axes.
        skipped = vary_alike([state.tokens, *jax.tree.leaves((rows, state))])[0]
        sampled = jax.lax.cond(
            jnp.any(emits),
            lambda: _sample(state, model.logits(rows), kv_lens),
            lambda: skipped,
        )
        bound = model.config.max_positions
        tokens, state = _advance(state, sampled, kv_lens, emits, page_size, bound)
        return tokens, cache, state

    return jax.jit(prefill, donate_argnums=(1, 2))


def make_decode_loop(model: nnx.Module, num_steps: int, *, early_exit: bool = False) -> DecodeLoop:
    """A jitted ``(params, cache, state) -> (tokens int32 [num_steps, B], cache, state)``.

    The loop runs ``num_steps`` decode steps without the host. A sequence that ends on the way
    emits NO_TOKEN from then on; the caller reads ``state.finished`` between calls. The cache and
    the state are donated.

    Args:
      num_steps: static number of steps.
      early_exit: leave the loop once every sequence has finished. On a GPU the test costs a
        synchronisation with the host in every step.
    """
    num_steps = static_int("make_decode_loop", "num_steps", num_steps)
    check(num_steps >= 1, "make_decode_loop", "num_steps", expected=">= 1", got=num_steps)
    graph = nnx.split(model)[0]

    def decode(
        params: Any, cache: PagedKVCache, state: DecodeState
    ) -> tuple[jax.Array, PagedKVCache, DecodeState]:
        model: Any = nnx.merge(graph, params)

        def body(carry: _Carry) -> _Carry:
            step, emitted, cache, state = carry
            tokens, cache, state = decode_step(model, cache, state)
            return step + 1, emitted.at[step].set(tokens), cache, state

        emitted = jnp.full((num_steps, state.tokens.shape[0]), NO_TOKEN, jnp.int32)
        carry = (jnp.int32(0), emitted, cache, state)
        if early_exit:

            def unfinished(carry: _Carry) -> jax.Array:
                step, _, _, state = carry
                return (step < num_steps) & ~jnp.all(state.finished)

            carry = jax.lax.while_loop(unfinished, body, carry)
        else:
            carry = jax.lax.fori_loop(0, num_steps, lambda _, c: body(c), carry)
        return carry[1:]

    return jax.jit(decode, donate_argnums=(1, 2))


_Carry = tuple[jax.Array, jax.Array, PagedKVCache, DecodeState]


def decode_step(
    model: Any, cache: PagedKVCache, state: DecodeState
) -> tuple[jax.Array, PagedKVCache, DecodeState]:
    """One decode step, for a loop of one's own: -> (tokens int32 ``[B]``, cache, state)."""
    running = ~state.finished
    slots = slots_of(state.page_table, state.kv_lens, cache.page_size)
    lens = jnp.where(running, state.kv_lens + 1, 0)
    inputs = StepInputs(
        tokens=state.tokens,
        positions=state.kv_lens,
        slots=jnp.where(running, slots, -1),
        page_table=state.page_table,
        kv_lens=lens,
    )
    hidden, cache = model(inputs, cache)
    kv_lens = jnp.where(running, state.kv_lens + 1, state.kv_lens)
    sampled = _sample(state, model.logits(hidden), kv_lens)
    bound = model.config.max_positions
    tokens, state = _advance(state, sampled, kv_lens, running, cache.page_size, bound)
    return tokens, cache, state


def _check_chunk(state: DecodeState, chunk: PrefillChunk) -> None:
    dims = Dims("prefill")
    dims.match("state.page_table", state.page_table, "B M")
    dims.match("chunk.tokens", chunk.tokens, "T")
    for name in ("q_starts", "q_lens", "completes"):
        dims.match(f"chunk.{name}", getattr(chunk, name), "B")
    for name in ("tokens", "q_starts", "q_lens"):
        check_dtype("prefill", f"chunk.{name}", getattr(chunk, name), (jnp.int32,))
    check_dtype("prefill", "chunk.completes", chunk.completes, (jnp.bool_,))


def _prefill_inputs(page_size: int, state: DecodeState, chunk: PrefillChunk) -> StepInputs:
    num_rows = chunk.tokens.shape[0]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    offsets = rows[:, None] - chunk.q_starts[None, :]
    owns = (offsets >= 0) & (offsets < chunk.q_lens[None, :])
    sequence = jnp.argmax(owns, axis=1)
    owned = jnp.any(owns, axis=1)
    offset = jnp.take_along_axis(offsets, sequence[:, None], axis=1)[:, 0]
    positions = jnp.where(owned, state.kv_lens[sequence] + offset, 0)
    slots = slots_of(state.page_table[sequence], positions, page_size)
    return StepInputs(
        tokens=chunk.tokens,
        positions=positions,
        slots=jnp.where(owned, slots, -1),
        page_table=state.page_table,
        kv_lens=jnp.where(chunk.q_lens > 0, state.kv_lens + chunk.q_lens, 0),
        q_starts=chunk.q_starts,
        q_lens=chunk.q_lens,
        max_q_len=num_rows,
    )


def _sample(state: DecodeState, logits: jax.Array, kv_lens: jax.Array) -> jax.Array:
    return sample(logits, state.sampling, state.seeds, kv_lens, state.counts)


def _advance(
    state: DecodeState,
    sampled: jax.Array,
    kv_lens: jax.Array,
    emits: jax.Array,
    page_size: int,
    max_positions: int,
) -> tuple[jax.Array, DecodeState]:
    """Take the sampled token of the sequences that emit, and see which of them end with it."""
    at_eos = jnp.any(sampled[:, None] == state.eos_ids, axis=1)
    # A token without a page to go to could not be attended to: the sequence ends before it is
    # fed back.
    has_room = slots_of(state.page_table, kv_lens, page_size) >= 0
    limits = jnp.minimum(state.limits, max_positions)
    ends = at_eos | (kv_lens + 1 >= limits) | ~has_room
    counts = state.counts
    if counts is not None:
        counts = update_counts(counts, sampled, emits)
    state = dataclasses.replace(
        state,
        tokens=jnp.where(emits, sampled, state.tokens),
        kv_lens=kv_lens,
        finished=jnp.where(emits, ends, state.finished),
        counts=counts,
    )
    return jnp.where(emits, sampled, NO_TOKEN), state
