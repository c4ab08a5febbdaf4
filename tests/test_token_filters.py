"""Top-k, top-p and min-p against an independent float64 form with a full sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import _token_filters as filters
from jax_hpc.sampling import SamplingParams
from tests.support.numerics import assert_bitwise, assert_close
from tests.support.token_logits import B, V, allowed, logits_of


def allowed_float64(row, temperature, top_k, top_p, min_p):
    """The kept set of one row, or None where float32 could not be held to top_p's edge."""
    scaled = row.astype(np.float64) / temperature
    ascending = np.sort(scaled)
    kept = np.ones(len(row), bool)
    if 0 < top_k < len(row):
        kept = scaled >= ascending[-top_k]
    weight = np.where(kept, np.exp(scaled - ascending[-1]), 0)
    probability = weight / weight.sum()
    if top_p < 1:
        order = np.argsort(-scaled, kind="stable")
        cumulative = np.cumsum(probability[order])
        if np.min(np.abs(cumulative - top_p)) < 1e-6:
            return None
        last = order[np.argmax(cumulative >= top_p)]
        kept &= scaled >= scaled[last]
    ratio = probability / probability.max()
    if min_p > 0 and np.min(np.abs(ratio - min_p)) < 1e-6:
        return None
    return kept & (ratio >= min_p)


@pytest.mark.parametrize("draw", range(6))
def test_kept_sets_equal_a_sorted_float64_form(rng, draw):
    logits = logits_of(rng)
    temperature = rng.uniform(0.3, 2, B)
    top_k = rng.integers(0, V + 20, B)
    top_p = np.where(rng.random(B) < 0.3, 1, rng.uniform(0.01, 1, B)).astype(np.float32)
    min_p = np.where(rng.random(B) < 0.5, 0, rng.uniform(0, 0.5, B)).astype(np.float32)
    if draw == 0:
        top_k, top_p = np.zeros(B, np.int64), np.ones(B, np.float32)  # only min-p
    params = SamplingParams.create(
        B, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    got = np.asarray(allowed(jnp.asarray(logits), params))
    compared = 0
    for row in range(B):
        want = allowed_float64(
            logits[row],
            np.float64(np.float32(temperature[row])),
            top_k[row],
            np.float64(top_p[row]),
            np.float64(min_p[row]),
        )
        if want is None:
            continue
        compared += 1
        finite = np.isfinite(logits[row])
        different = np.nonzero((got[row] != want) & finite)[0]
        assert different.size == 0, (
            f"row {row}, T={temperature[row]:.3f} k={top_k[row]} p={top_p[row]} m={min_p[row]}: "
            f"tokens {different} are {got[row][different]}, expected {want[different]}"
        )
    assert compared >= B // 2


def test_top_k_keeps_every_equal_of_the_kth():
    logits = jnp.asarray([[1.0, 3.0, 2.0, 2.0, -0.0, 0.0, 2.0, -5.0]])
    for k, want in [(1, [1]), (2, [1, 2, 3, 6]), (4, [1, 2, 3, 6]), (6, [0, 1, 2, 3, 4, 5, 6])]:
        kept = allowed(logits, SamplingParams.create(1, top_k=k))
        assert np.nonzero(np.asarray(kept)[0])[0].tolist() == want, f"top_k={k}"


def test_the_smallest_top_p_keeps_the_largest_and_its_equals():
    logits = jnp.asarray([[1.0, 4.0, 2.0, 4.0]])
    kept = allowed(logits, SamplingParams.create(1, top_p=1e-30))
    assert np.asarray(kept).tolist() == [[False, True, False, True]]


def test_top_p_is_taken_of_what_top_k_left():
    # Probabilities 0.4, 0.3, 0.2, 0.1: among the top two the first alone has 4/7 >= 0.5.
    logits = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1]]))
    both = allowed(logits, SamplingParams.create(1, top_k=2, top_p=0.5))
    alone = allowed(logits, SamplingParams.create(1, top_p=0.5))
    assert np.asarray(both).tolist() == [[True, False, False, False]]
    assert np.asarray(alone).tolist() == [[True, True, False, False]]


def test_mass_is_exact_and_ignores_the_order_of_addition(rng):
    weights = np.exp(-rng.exponential(8, (64, 5000))).astype(np.float32)
    weights[2] = 1  # the largest sum there is
    shuffled = rng.permuted(weights, axis=1)
    mass = jax.jit(filters.mass)
    assert_bitwise(mass(jnp.asarray(shuffled)), mass(jnp.asarray(weights)))
    assert_close(mass(jnp.asarray(weights)), weights.astype(np.float64).sum(1), rtol=2e-7)


@pytest.mark.parametrize("vocab", [2**17 - 1, 2**18, 151_936])
def test_mass_does_not_overflow_at_large_vocabularies(vocab):
    assert float(jax.jit(filters.mass)(jnp.ones(vocab))) == vocab


def test_order_image_follows_float_order(rng):
    bits = rng.integers(0, 2**32, 4000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.concatenate([values[np.isfinite(values)], [0.0, -0.0, np.inf, -np.inf]])
    values = values[(values == 0) | (np.abs(values) > np.finfo(np.float32).tiny)]
    image = np.asarray(filters.ordered(jnp.asarray(values.astype(np.float32)))).astype(np.int64)
    by_value = np.argsort(values, kind="stable")
    steps, rises = np.diff(image[by_value]), np.diff(values[by_value]) > 0
    assert np.all(steps[rises] > 0) and np.all(steps[~rises] == 0)


def test_the_loop_and_its_unrolled_form_find_the_same_threshold(rng):
    order = filters.ordered(jnp.asarray(logits_of(rng)))
    k = jnp.asarray(rng.integers(1, V + 1, B), jnp.int32)

    def enough(thresholds):
        return jnp.sum(order[:, None, :] >= thresholds[:, :, None], -1) >= k[:, None]

    lowest = jnp.zeros(B, jnp.uint32)
    unrolled = jax.jit(lambda x: filters.search_unrolled(enough, x))(lowest)
    assert_bitwise(jax.jit(lambda x: filters.search(enough, x))(lowest), unrolled)
    assert_bitwise(unrolled, np.sort(np.asarray(order), -1)[np.arange(B), V - np.asarray(k)])
