"""The generator: what a caller may do with it, and its figures."""

import functools
from typing import Any

import numpy as np
import pytest

from jax_hpc.generate import Generator
from jax_hpc.sampling import SamplingParams
from tests.support import tiny_models

NEW = 6


@functools.cache
def generator() -> Generator:
    model = tiny_models.qwen3_moe(num_layers=1, sparse_layers=(True,))
    return Generator(model, page_size=16, burst=4, prefill_chunk=16)


def prompts(rng: np.random.Generator, *lengths: int) -> list[list[int]]:
    return [rng.integers(0, 96, n).tolist() for n in lengths]


def tokens(bursts: Any) -> np.ndarray:
    return np.concatenate([burst.tokens for burst in bursts])


def test_arguments_can_be_used_again(rng: np.random.Generator) -> None:
    """The loop donates its state; the caller's arrays are not part of it."""
    sampling = SamplingParams.create(2, temperature=[0.7, 1.2], repetition_penalty=1.1)
    arguments: dict[str, Any] = dict(max_new_tokens=NEW, sampling=sampling, seeds=[3, 4])
    given = prompts(rng, 5, 9)
    first = tokens(generator().stream(given, **arguments))
    again = tokens(generator().stream(given, **arguments))
    np.testing.assert_array_equal(first, again)


def test_streams_do_not_disturb_each_other(rng: np.random.Generator) -> None:
    """Two streams begun before either is read, of different batches."""
    one, two = prompts(rng, 4, 7, 3), prompts(rng, 4, 3)
    want = [tokens(generator().stream(p, max_new_tokens=NEW)) for p in (one, two)]
    first = generator().stream(one, max_new_tokens=NEW)
    second = generator().stream(two, max_new_tokens=NEW)
    stats = generator().stats
    got = tokens(second)
    assert (stats.batch, stats.prompt_tokens, stats.new_tokens) == (2, 7, 2 * NEW)
    np.testing.assert_array_equal(got, want[1])
    np.testing.assert_array_equal(tokens(first), want[0])
    assert stats.new_tokens == 2 * NEW


def test_figures_count_what_was_generated(rng: np.random.Generator) -> None:
    bursts = list(generator().stream(prompts(rng, 4, 3), max_new_tokens=NEW))
    stats = generator().stats
    assert [len(b.tokens) for b in bursts] == [1, 4, 4]
    assert [b.finished.all() for b in bursts] == [False, False, True]
    assert (stats.prompt_tokens, stats.new_tokens, stats.decode_steps) == (7, 2 * NEW, NEW - 1)
    # The caches hold 5 to 9 and 4 to 8 tokens in the steps that read them.
    assert stats.mean_kv_len == pytest.approx((sum(range(5, 10)) + sum(range(4, 9))) / 10)
    assert stats.tpot_seconds == pytest.approx(stats.decode_seconds / (NEW - 1))
    elapsed = stats.ttft_seconds + stats.decode_seconds
    assert stats.tokens_per_second == pytest.approx(2 * NEW / elapsed)


def test_chunks_do_not_change_the_text(rng: np.random.Generator) -> None:
    """Prompts that cross the chunk's 16 rows, one of them several times."""
    given = prompts(rng, 10, 45)
    wide = Generator(generator().model, page_size=16, burst=4, prefill_chunk=512)
    np.testing.assert_array_equal(
        tokens(generator().stream(given, max_new_tokens=NEW)),
        tokens(wide.stream(given, max_new_tokens=NEW)),
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompts": []}, ValueError, "'prompts' must be non-empty"),
        ({"prompts": [[1], []]}, ValueError, r"'prompts\[1\]' must be 1 to 255 tokens, got 0"),
        ({"prompts": [[1] * 256]}, ValueError, r"'prompts\[0\]' must be 1 to 255 tokens, got 256"),
        ({"prompts": [[1, 96]]}, ValueError, r"ids in \[0, 96\), got ids from 1 to 96"),
        ({"prompts": [1, 2]}, TypeError, r"'prompts\[0\]' must be a sequence of token ids, got 1"),
        ({"prompts": ["text"]}, TypeError, "must be a sequence of token ids, got 'text'"),
        ({"prompts": [[1.5]]}, TypeError, "must be a sequence of token ids"),
        ({"max_new_tokens": 0}, ValueError, "'max_new_tokens' must be >= 1, got 0"),
        ({"seeds": [-1]}, ValueError, r"'seeds' must be in \[0, 2\^32\), got -1"),
        ({"seeds": [1, 2]}, ValueError, r"'seeds' must have shape \[B\] with B = 1"),
        ({"sampling": SamplingParams.create(2)}, ValueError, r"must have shape \[B\] with B = 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        generator().stream(**({"prompts": [[1]], "max_new_tokens": NEW} | arguments))


def test_bad_sizes() -> None:
    model = generator().model
    for sizes, message in [
        ({"page_size": 8}, "'page_size' must be one of 16, 32, 64, 128, got 8"),
        ({"burst": 0}, "'burst' must be >= 1, got 0"),
        ({"prefill_chunk": 8}, "'prefill_chunk' must be >= 16, got 8"),
    ]:
        with pytest.raises(ValueError, match=f"Generator: argument {message}"):
            Generator(model, **sizes)
