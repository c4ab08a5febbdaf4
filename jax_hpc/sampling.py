"""Choosing the next token on the device: penalties, filters and a draw that ignores its batch.

``sample`` is a plain jax.numpy function of fixed shape: it runs under jit, scan and while_loop
and never looks at the host. The order of its steps is Hugging Face transformers' order:

    repetition, frequency and presence penalties
    greedy rows: the largest logit
    temperature, top-k, top-p (of what top-k left), min-p

vLLM applies min-p before top-k and top-p instead; the two differ only in rows that use min-p
together with top-p. How the filters do without a sort is told in ``_token_filters``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_hpc._checks import Dims, check, check_dtype
from jax_hpc._primitive import vary_alike
from jax_hpc._token_filters import allowed_tokens

_SMALLEST_NORMAL = np.finfo(np.float32).tiny
_LARGEST = np.finfo(np.float32).max
_BELOW_ONE = np.float32(1 - 2**-24)

type Setting[T] = T | Sequence[T] | np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingParams:
    """How each row of a batch samples; every field is an array [B].

    temperature:        float32, 0 = greedy (the other filters then do not matter)
    top_k:              int32, keep the k largest logits (and their equals), 0 = off
    top_p:              float32, keep the fewest largest whose mass reaches top_p, 1 = off
    min_p:              float32, drop tokens below min_p times the largest probability, 0 = off
    repetition_penalty: float32, 1 = off (CTRL, arXiv:1909.05858; over prompt and output)
    frequency_penalty:  float32, 0 = off (OpenAI; times the count in the output)
    presence_penalty:   float32, 0 = off (OpenAI; once if in the output)

    The penalties act only where ``sample`` is given ``counts``.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    frequency_penalty: Array
    presence_penalty: Array

    @classmethod
    def greedy(cls, batch: int) -> Self:
        """Every row takes its largest logit."""
        return cls.create(batch, temperature=0.0)

    @classmethod
    def create(
        cls,
        batch: int,
        *,
        temperature: Setting[float] = 1.0,
        top_k: Setting[int] = 0,
        top_p: Setting[float] = 1.0,
        min_p: Setting[float] = 0.0,
        repetition_penalty: Setting[float] = 1.0,
        frequency_penalty: Setting[float] = 0.0,
        presence_penalty: Setting[float] = 0.0,
    ) -> Self:
        """Checked parameters for ``batch`` rows, from numbers or from one number per row.

        Raises ValueError, naming the argument, for a value outside its range or a sequence
        of another length than ``batch``; TypeError for what is no number, or a top_k that is no
        integer.
        """

        def setting(name, value, expected, within):
            return _setting(name, value, batch, expected, within)

        return cls(
            temperature=setting("temperature", temperature, ">= 0", lambda v: v >= 0),
            top_k=_setting(
                "top_k", top_k, batch, "in [0, 2^31)", lambda v: (v >= 0) & (v < 2**31), np.int32
            ),
            top_p=setting("top_p", top_p, "in (0, 1]", lambda v: (v > 0) & (v <= 1)),
            min_p=setting("min_p", min_p, "in [0, 1)", lambda v: (v >= 0) & (v < 1)),
            repetition_penalty=setting(
                "repetition_penalty", repetition_penalty, "> 0", lambda v: v > 0
            ),
            frequency_penalty=setting(
                "frequency_penalty", frequency_penalty, "finite", np.isfinite
            ),
            presence_penalty=setting("presence_penalty", presence_penalty, "finite", np.isfinite),
        )

    def uses_penalties(self) -> bool:
        """Whether any row needs ``TokenCounts``; reads the arrays, so for host code only."""
        return bool(
            np.any(np.asarray(self.repetition_penalty) != 1)
            or np.any(np.asarray(self.frequency_penalty) != 0)
            or np.any(np.asarray(self.presence_penalty) != 0)
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenCounts:
    """Which tokens each row has seen: what the penalties look at.

    prompt: bool [B, V], the token is in the prompt
    output: int32 [B, V], how often the token was generated
    """

    prompt: Array
    output: Array

    @classmethod
    def zeros(cls, batch: int, vocab: int) -> Self:
        """Nothing seen yet."""
        return cls(jnp.zeros((batch, vocab), bool), jnp.zeros((batch, vocab), jnp.int32))

    @classmethod
    def from_prompts(cls, prompts: Sequence[Sequence[int]], vocab: int) -> Self:
        """The prompts' tokens marked, nothing generated; one row per prompt.

        Raises ValueError for a token id outside [0, vocab).
        """
        seen = np.zeros((len(prompts), vocab), bool)
        for row, prompt in enumerate(prompts):
            tokens = np.asarray(prompt, np.int64)
            outside = tokens[(tokens < 0) | (tokens >= vocab)]
            if outside.size:
                raise ValueError(
                    f"TokenCounts.from_prompts: prompts[{row}] must hold token ids in "
                    f"[0, {vocab}), got {outside[0]}"
                )
            seen[row, tokens] = True
        return cls(jnp.asarray(seen), jnp.zeros(seen.shape, jnp.int32))


def update_counts(counts: TokenCounts, tokens: Array, active: Array) -> TokenCounts:
    """Count one generated token per row; rows that are not active keep their counts.

    tokens: int32 [B]; ids outside [0, V) (padding) are not counted.
    active: bool [B]
    """
    dims = Dims("update_counts")
    dims.match("counts.output", counts.output, "B V")
    dims.match("tokens", tokens, "B")
    dims.match("active", active, "B")
    check_dtype("update_counts", "active", active, (jnp.bool_,))
    vocab = dims["V"]
    # A negative index would wrap round to the end of the vocabulary; V is out of range, dropped.
    ids = jnp.where(active & (tokens >= 0), tokens, vocab)
    rows = jnp.arange(dims["B"])
    output = counts.output.at[rows, ids].add(1, mode="drop", unique_indices=True)
    return TokenCounts(counts.prompt, output)


def sample(
    logits: Array,
    params: SamplingParams,
    seeds: Array,
    positions: Array,
    counts: TokenCounts | None = None,
) -> Array:
    """One token per row: int32 [B].

    logits:    float32 [B, V]
    params:    SamplingParams of B rows; a temperature of 0 means the largest logit
    seeds:     uint32 [B], one per sequence
    positions: int32 [B], the position of the token that is drawn. Seed and position alone make
               the noise, so a row draws the same token in any batch, and a request repeated
               with its seed repeats its text.
    counts:    the tokens seen, for the penalties; None leaves the penalties out

    A NaN logit counts as -inf; ties of the largest go to the lower id; a row with no finite
    logit gives token 0. Raises ValueError for shapes and TypeError for dtypes that do not fit.
    """
    _check(logits, params, seeds, positions, counts)
    logits, params, seeds, positions, counts = _vary_together(
        (logits, params, seeds, positions, counts)
    )
    if counts is not None:
        logits = _penalise(logits, params, counts)
    # After this line a logit is finite or -inf.
    logits = jnp.minimum(jnp.where(jnp.isnan(logits), -jnp.inf, logits), _LARGEST)
    greedy = params.temperature <= 0
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Array:
        return jnp.where(greedy, best, _draw(logits, params, seeds, positions))

    return lax.cond(jnp.all(greedy), lambda: best, draw)


def _check(
    logits: Array,
    params: SamplingParams,
    seeds: Array,
    positions: Array,
    counts: TokenCounts | None,
) -> None:
    dims = Dims("sample")
    dims.match("logits", logits, "B V")
    check(dims["V"] >= 1, "sample", "logits", expected="[B, V] with V >= 1", got=logits.shape)
    check_dtype("sample", "logits", logits, (jnp.float32,))
    for field in fields(params):
        dims.match(f"params.{field.name}", getattr(params, field.name), "B")
    dims.match("seeds", seeds, "B")
    check_dtype("sample", "seeds", seeds, (jnp.uint32,))
    dims.match("positions", positions, "B")
    check_dtype("sample", "positions", positions, (jnp.int32,))
    if counts is not None:
        dims.match("counts.prompt", counts.prompt, "B V")
        dims.match("counts.output", counts.output, "B V")


def _vary_together[T](operands: T) -> T:
    """Inside shard_map the branches of a cond must vary over the same mesh axes."""
    leaves, tree = jax.tree.flatten(operands)
    return jax.tree.unflatten(tree, vary_alike(leaves))


def _penalise(logits: Array, params: SamplingParams, counts: TokenCounts) -> Array:
    repetition = params.repetition_penalty[:, None]
    frequency = params.frequency_penalty[:, None]
    presence = params.presence_penalty[:, None]

    def apply() -> Array:
        seen = counts.prompt | (counts.output > 0)
        repeated = jnp.where(logits < 0, logits * repetition, logits / repetition)
        penalised = jnp.where(seen, repeated, logits)
        penalised = penalised - frequency * counts.output.astype(jnp.float32)
        return penalised - presence * (counts.output > 0).astype(jnp.float32)

    used = jnp.any((repetition != 1) | (frequency != 0) | (presence != 0))
    return lax.cond(used, apply, lambda: logits)


def _draw(logits: Array, params: SamplingParams, seeds: Array, positions: Array) -> Array:
    """Gumbel-max over the tokens that the filters leave: no normalisation, no cumulative sum."""
    scores = _tempered(logits, params.temperature)
    allowed = allowed_tokens(logits, jnp.exp(scores), params.top_k, params.top_p, params.min_p)
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(seeds, positions, logits.shape[-1])
    noisy = jnp.where(allowed, scores + noise, -jnp.inf)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def _tempered(logits: Array, temperature: Array) -> Array:
    """(logits - largest) / temperature: at most 0, so that no temperature overflows."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return (logits - largest) / jnp.maximum(temperature, _SMALLEST_NORMAL)[:, None]


def _gumbel(seed: Array, position: Array, vocab: int) -> Array:
    """Standard Gumbel noise of one row [V].

    -log(-log1p(-v)) keeps all 32 random bits where v is small, which is where the winners come
    from; the usual -log(-log(u)) rounds there to multiples of 2^-24 and would tie large, flat
    vocabularies. The generator is named so that no configuration changes a sample.
    """
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    bits = jax.random.bits(key, (vocab,), jnp.uint32)
    v = (bits.astype(jnp.float32) + 0.5) * np.float32(2.0**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(v, _BELOW_ONE)))


def _setting(
    name: str,
    value: Setting,
    batch: int,
    expected: str,
    within: Callable[[np.ndarray], np.ndarray],
    dtype: type[np.generic] = np.float32,
) -> Array:
    values = np.asarray(value)
    if dtype is np.int32 and not np.issubdtype(values.dtype, np.integer):
        raise TypeError(f"SamplingParams: argument '{name}' must be an integer, got {value!r}")
    if not np.issubdtype(values.dtype, np.number):
        raise TypeError(f"SamplingParams: argument '{name}' must be a number, got {value!r}")
    if values.ndim > 1 or (values.ndim == 1 and len(values) != batch):
        raise ValueError(
            f"SamplingParams: argument '{name}' must be one value or {batch} values, "
            f"got shape {values.shape}"
        )
    wrong = values[~np.asarray(within(values) & np.isfinite(values))]
    if wrong.size:
        raise ValueError(f"SamplingParams: argument '{name}' must be {expected}, got {wrong[0]}")
    return jnp.asarray(np.broadcast_to(values, (batch,)).astype(dtype))
