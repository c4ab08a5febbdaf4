"""Text generation for a fixed batch of prompts: chunked prefill, then bursts of decode steps."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hpc._checks import check, check_choice
from jax_hpc.cache import DEFAULT_PAGE_SIZE, PAGE_SIZES, PagedKVCache, pages_for
from jax_hpc.decode import (
    NO_TOKEN,
    DecodeState,
    PrefillChunk,
    compiler_options,
    make_decode_loop,
    make_prefill,
    params_of,
)
from jax_hpc.sampling import SamplingParams, TokenCounts

SMALLEST_CHUNK = 16


@dataclasses.dataclass(frozen=True)
class Burst:
    """Tokens of a few steps.

    tokens: int32 ``[steps, B]``, -1 where a sequence had ended or had no token yet.
    finished: bool ``[B]`` after the burst.
    """

    tokens: np.ndarray
    finished: np.ndarray


@dataclasses.dataclass
class GenerationStats:
    """What a call of :meth:`Generator.stream` took; compilation is counted apart."""

    batch: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    decode_steps: int = 0
    compile_seconds: float = 0.0
    ttft_seconds: float = 0.0
    decode_seconds: float = 0.0
    kv_tokens_read: int = 0

    @property
    def mean_kv_len(self) -> float:
        """Cached tokens that a sequence attended to in a decode step; an ended one counts as 0."""
        rows = self.decode_steps * self.batch
        return self.kv_tokens_read / rows if rows else 0.0

    @property
    def tpot_seconds(self) -> float:
        """Time per output token: of one decode step, whatever the batch.

        Steps count up to the last token. Without ``early_exit`` the last burst still runs to its
        end, without work for any sequence, and that is in the time: the figure of a text of few
        bursts is an upper bound.
        """
        return self.decode_seconds / self.decode_steps if self.decode_steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences over the whole time, compilation left out."""
        elapsed = self.ttft_seconds + self.decode_seconds
        return self.new_tokens / elapsed if elapsed > 0 else 0.0


class Generator:
    """Generates from a filled model. Compiled functions are kept between calls of equal shapes.

    Args:
      model: a model of :mod:`jax_hpc.models` with its weights.
      page_size: tokens per page of the KV cache.
      kv_cache_dtype: bf16, float32 or float8_e4m3fn; the model's dtype by default.
      k_scales_per_token: of an fp8 cache: quantise K with a scale per token and head, instead of
        the model's static scale.
      burst: decode steps between two looks of the host at the tokens.
      prefill_chunk: prompt tokens of one prefill step, over all sequences.
      early_exit: see :func:`jax_hpc.decode.make_decode_loop`.
    """

    def __init__(
        self,
        model: Any,
        *,
        page_size: int = DEFAULT_PAGE_SIZE,
        kv_cache_dtype: jax.typing.DTypeLike | None = None,
        k_scales_per_token: bool = False,
        burst: int = 16,
        prefill_chunk: int = 512,
        early_exit: bool = False,
    ) -> None:
        check_choice("Generator", "page_size", page_size, PAGE_SIZES)
        check(burst >= 1, "Generator", "burst", expected=">= 1", got=burst)
        check(
            prefill_chunk >= SMALLEST_CHUNK,
            "Generator",
            "prefill_chunk",
            expected=f">= {SMALLEST_CHUNK}",
            got=prefill_chunk,
        )
        self.model = model
        self.params = params_of(model)
        self.page_size = page_size
        self.kv_cache_dtype = kv_cache_dtype
        self.k_scales_per_token = k_scales_per_token
        self.burst = burst
        self.prefill_chunk = prefill_chunk
        self.stats = GenerationStats()
        self._prefill: Any = make_prefill(model)
        self._decode: Any = make_decode_loop(model, burst, early_exit=early_exit)
        self._options = compiler_options(model)
        self._compiled: dict[Any, Any] = {}

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_ids: Sequence[int] = (),
        sampling: SamplingParams | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Iterator[Burst]:
        """Yield tokens as they come: one burst of a single step after prefill, then full bursts.

        Args:
          prompts: token ids per sequence, none empty.
          max_new_tokens: bound for each sequence; the end of the model's positions is another.
          eos_ids: tokens that end a sequence (they are emitted).
          sampling: of B rows; greedy if None. seeds: one per sequence; 0 .. B - 1 if None.

        Raises:
          ValueError: an empty prompt, one with an id outside the vocabulary, or one longer than
            the model's positions allow; a seed outside [0, 2^32).
          TypeError: a prompt that is not a sequence of integers.
        """
        self._check(prompts, max_new_tokens, seeds)
        state, cache = self._start(prompts, max_new_tokens, eos_ids, sampling, seeds)
        chunks = list(_chunks(prompts, self.prefill_chunk))
        self.stats = GenerationStats(
            batch=len(prompts), prompt_tokens=sum(len(p) for p in prompts)
        )
        self._compile(cache, state, chunks)
        return self._run(cache, state, chunks, self.stats)

    def _run(
        self,
        cache: PagedKVCache,
        state: DecodeState,
        chunks: Sequence[PrefillChunk],
        stats: GenerationStats,
    ) -> Iterator[Burst]:
        begin = time.perf_counter()
        first = np.full(stats.batch, NO_TOKEN, np.int32)
        for chunk in chunks:
            prefill = self._compiled[_prefill_key(chunk, cache, state)]
            tokens, cache, state = prefill(self.params, cache, state, chunk)
            # Reading here keeps one chunk in flight; a completed prompt's token stays.
            first = np.where(np.asarray(tokens) == NO_TOKEN, first, np.asarray(tokens))
        stats.ttft_seconds = time.perf_counter() - begin
        burst = Burst(first[None, :], np.asarray(state.finished))
        stats.new_tokens += int(np.sum(burst.tokens != NO_TOKEN))
        yield burst
        decode = self._compiled[_decode_key(cache, state)]
        lengths = np.asarray(state.kv_lens)
        while not burst.finished.all():
            begin = time.perf_counter()
            tokens, cache, state = decode(self.params, cache, state)
            burst = Burst(np.asarray(tokens), np.asarray(state.finished))
            stats.decode_seconds += time.perf_counter() - begin
            emitted = burst.tokens != NO_TOKEN
            stats.decode_steps += int(np.sum(emitted.any(axis=1)))
            stats.new_tokens += int(emitted.sum())
            read = lengths + np.cumsum(emitted, axis=0)
            stats.kv_tokens_read += int(read[emitted].sum())
            lengths = read[-1]
            yield burst

    def _check(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        seeds: Sequence[int] | None,
    ) -> None:
        config = self.model.config
        check(len(prompts) > 0, "generate", "prompts", expected="non-empty", got="no prompts")
        check(
            max_new_tokens >= 1, "generate", "max_new_tokens", expected=">= 1", got=max_new_tokens
        )
        for index, prompt in enumerate(prompts):
            name = f"prompts[{index}]"
            kind = np.asarray(prompt)
            if kind.ndim != 1 or (kind.size and kind.dtype.kind not in "iu"):
                raise TypeError(
                    f"generate: argument '{name}' must be a sequence of token ids, got {prompt!r}"
                )
            limit = config.max_positions - 1
            check(
                1 <= len(prompt) <= limit,
                "generate",
                name,
                expected=f"1 to {limit} tokens",
                got=f"{len(prompt)} tokens",
            )
            check(
                0 <= min(prompt) and max(prompt) < config.vocab_size,
                "generate",
                name,
                expected=f"token ids in [0, {config.vocab_size})",
                got=f"ids from {min(prompt)} to {max(prompt)}",
            )
        for seed in seeds if seeds is not None else ():
            check(0 <= seed < 2**32, "generate", "seeds", expected="in [0, 2^32)", got=seed)

    def _start(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        eos_ids: Sequence[int],
        sampling: SamplingParams | None,
        seeds: Sequence[int] | None,
    ) -> tuple[DecodeState, PagedKVCache]:
        config, batch = self.model.config, len(prompts)
        lengths = [min(len(p) + max_new_tokens, config.max_positions) for p in prompts]
        width = pages_for(max(lengths), self.page_size)
        table = np.full((batch, width), -1, np.int32)
        num_pages = 0
        for row, length in enumerate(lengths):
            count = pages_for(length, self.page_size)
            table[row, :count] = np.arange(num_pages, num_pages + count)
            num_pages += count
        uses_penalties = sampling is not None and sampling.uses_penalties()
        eos = np.full((batch, max(1, len(eos_ids))), NO_TOKEN, np.int32)
        eos[:, : len(eos_ids)] = np.asarray(eos_ids, np.int32)
        state = DecodeState.create(
            jnp.asarray(table),
            jnp.asarray(lengths, jnp.int32),
            eos_ids=jnp.asarray(eos),
            seeds=None if seeds is None else jnp.asarray(seeds, jnp.uint32),
            sampling=sampling,
            counts=TokenCounts.from_prompts(prompts, config.vocab_size)
            if uses_penalties
            else None,
        )
        cache = self.model.new_cache(
            num_pages,
            self.page_size,
            self.kv_cache_dtype,
            k_scales_per_token=self.k_scales_per_token,
        )
        return state, cache

    def _compile(
        self, cache: PagedKVCache, state: DecodeState, chunks: Sequence[PrefillChunk]
    ) -> None:
        begin = time.perf_counter()
        for chunk in chunks:
            key = _prefill_key(chunk, cache, state)
            if key not in self._compiled:
                lowered = self._prefill.lower(self.params, cache, state, chunk)
                self._compiled[key] = lowered.compile(self._options)
        key = _decode_key(cache, state)
        if key not in self._compiled:
            lowered = self._decode.lower(self.params, cache, state)
            self._compiled[key] = lowered.compile(self._options)
        self.stats.compile_seconds = time.perf_counter() - begin


def _decode_key(cache: PagedKVCache, state: DecodeState) -> Any:
    leaves, tree = jax.tree.flatten((cache, state))
    return "decode", tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _prefill_key(chunk: PrefillChunk, cache: PagedKVCache, state: DecodeState) -> Any:
    return "prefill", chunk.tokens.shape, _decode_key(cache, state)


def _chunks(prompts: Sequence[Sequence[int]], size: int) -> Iterator[PrefillChunk]:
    """Cut the prompts, laid end to end, into chunks of at most ``size`` rows.

    A chunk's rows are padded to a power of two, so that few shapes are compiled.
    """
    lengths = np.array([len(p) for p in prompts])
    tokens = np.concatenate([np.asarray(p, np.int32) for p in prompts])
    ends = np.cumsum(lengths)
    starts = ends - lengths
    for begin in range(0, len(tokens), size):
        end = min(begin + size, len(tokens))
        first, last = np.clip(starts, begin, end), np.clip(ends, begin, end)
        q_lens = last - first
        rows = np.zeros(
            min(size, max(SMALLEST_CHUNK, 1 << (end - begin - 1).bit_length())), np.int32
        )
        rows[: end - begin] = tokens[begin:end]
        yield PrefillChunk(
            tokens=jnp.asarray(rows),
            q_starts=jnp.asarray(np.where(q_lens > 0, first - begin, 0), jnp.int32),
            q_lens=jnp.asarray(q_lens, jnp.int32),
            completes=jnp.asarray((q_lens > 0) & (ends <= end)),
        )
