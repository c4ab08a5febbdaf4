"""The route_topk kernel on a GPU: every formula against float64, edges, repeats, graphs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import RouteResult, route_topk
from jax_hpc.ops.route_topk.cases import CASES, Case
from tests.support.numerics import assert_bitwise, assert_close
from tests.support.route_check import assert_route

pytestmark = pytest.mark.gpu

# Experts on both sides of every instance's limits, and more than registers hold.
EXPERTS = (1, 31, 32, 33, 127, 128, 192, 193, 256, 257, 258, 384, 512, 514, 768, 769, 1000)
EXPERTS += (1023, 1024, 1025, 5000, 32768)
TOKENS = (1, 2, 33, 256, 257, 1001, 5000)

cuda = functools.partial(route_topk, implementation="cuda")


def logits_of(rng: np.random.Generator, tokens: int, experts: int, spread: float = 3) -> Any:
    return rng.normal(0, spread, (tokens, experts)).astype(np.float32)


def bias_of(rng: np.random.Generator, experts: int) -> np.ndarray:
    return rng.normal(0, 0.05, experts).astype(np.float32)


def check(logits: np.ndarray, k: int, bias: np.ndarray | None = None, **options: Any) -> Any:
    """The kernel against float64, twice, in the same bits."""
    given = jnp.asarray(logits)
    b = None if bias is None else jnp.asarray(bias)
    got = cuda(given, k, bias=b, **options)
    assert_route(got, logits, k, bias=bias, **options)
    assert_same(cuda(given, k, bias=b, **options), got)
    return got


def assert_same(got: RouteResult, want: RouteResult) -> None:
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("tokens", [1, 64, 700])
def test_models(rng: np.random.Generator, case: Case, tokens: int) -> None:
    logits = logits_of(rng, tokens, case.experts)
    bias = bias_of(rng, case.experts) if case.has_bias else None
    check(logits, case.k, bias, **case.options)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_experts(rng: np.random.Generator, experts: int, scoring: str) -> None:
    tokens = 3 if experts > 5000 else 9
    logits, bias = logits_of(rng, tokens, experts), bias_of(rng, experts)
    zero = {"num_zero_experts": experts // 3, "scale": 2.5}
    ks = {1, 8, 12, 16, 32, 33} | {experts if experts <= 1024 else 40}
    for turn, k in enumerate(sorted(k for k in ks if k <= experts)):
        options = zero if turn % 2 else {"renormalize": True}
        check(logits, k, bias if turn % 3 else None, scoring=scoring, **options)


@pytest.mark.parametrize("tokens", TOKENS)
def test_tokens(rng: np.random.Generator, tokens: int) -> None:
    for experts in (8, 160, 700, 1030):
        logits = logits_of(rng, tokens, experts)
        got = check(logits, 6, bias_of(rng, experts), renormalize=True)
        # A row's bits do not depend on the rows beside it, nor on how many there are, though more
        # than 256 take other instances.
        alone = cuda(jnp.asarray(logits[-1:]), 6, renormalize=True)
        among = cuda(jnp.asarray(logits), 6, renormalize=True)
        assert_same(RouteResult(*(a[-1:] for a in among)), alone)
        assert got.ids.shape == (tokens, 6)


@pytest.mark.parametrize(
    ("experts", "groups", "chosen", "k"),
    [
        (256, 8, 4, 8),
        (64, 32, 5, 9),
        (100, 50, 4, 7),
        (192, 3, 1, 12),
        (1024, 512, 20, 33),
        (1000, 4, 3, 16),
        (1200, 600, 30, 20),
        (4096, 8, 2, 8),
        (32768, 16384, 9, 12),
        (6, 3, 2, 3),
    ],
)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_groups(
    rng: np.random.Generator, experts: int, groups: int, chosen: int, k: int, scoring: str
) -> None:
    options = {"scoring": scoring, "num_groups": groups, "topk_groups": chosen}
    logits, bias = logits_of(rng, 40 if experts < 2000 else 3, experts), bias_of(rng, experts)
    check(logits, k, bias, renormalize=True, **options)
    check(logits, k, num_zero_experts=experts // 4, scale=6.0, **options)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [24, 192, 768, 1300])
def test_ties_go_to_the_lower_id(rng: np.random.Generator, experts: int, scoring: str) -> None:
    """Few different logits, so that many scores are equal to the bit: ids must be exact."""
    logits = rng.integers(-2, 3, (50, experts)).astype(np.float32)
    logits[0] = 0.0
    logits[1] = np.where(rng.integers(0, 2, experts), 0.0, -0.0)
    bias = rng.integers(-1, 2, experts).astype(np.float32)
    for k in (1, 8, 20):
        got = cuda(jnp.asarray(logits), k, scoring=scoring)
        want = np.argsort(-logits, axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(got.ids, want)
        # All scores of row 0 are one number, so the bias alone decides.
        got = cuda(jnp.asarray(logits[:1]), k, scoring=scoring, bias=jnp.asarray(bias))
        np.testing.assert_array_equal(got.ids[0], np.argsort(-bias, kind="stable")[:k])


def test_saturated_scores_tie(rng: np.random.Generator) -> None:
    """Different logits whose sigmoid is 1 in float32 are tied; a bias separates them."""
    logits = rng.uniform(30, 90, (20, 192)).astype(np.float32)
    got = cuda(jnp.asarray(logits), 8, scoring="sigmoid", renormalize=True)
    np.testing.assert_array_equal(got.ids, np.tile(np.arange(8), (20, 1)))
    np.testing.assert_array_equal(got.weights, np.full((20, 8), 0.125, np.float32))


def test_tied_groups_go_to_the_lower_id() -> None:
    zeros = jnp.zeros((2, 256))
    got = cuda(zeros, 8, scoring="sigmoid", num_groups=8, topk_groups=4)
    np.testing.assert_array_equal(got.ids, np.tile(np.arange(8), (2, 1)))
    bias = jnp.full((256,), -jnp.inf).at[jnp.asarray([200, 201, 10])].set(0.0)
    got = cuda(zeros, 8, scoring="sigmoid", bias=bias, num_groups=8, topk_groups=1)
    np.testing.assert_array_equal(
        got.ids, np.tile([200, 201, 192, 193, 194, 195, 196, 197], (2, 1))
    )


@pytest.mark.parametrize("experts", [12, 192, 384, 770, 2000])
@pytest.mark.parametrize("renormalize", [False, True])
def test_rows_of_nan_and_infinities(
    rng: np.random.Generator, experts: int, renormalize: bool
) -> None:
    logits = logits_of(rng, 9, experts)
    options = {"renormalize": renormalize, "num_zero_experts": experts // 3, "scale": 6.0}
    clean = cuda(jnp.asarray(logits), 5, **options)
    logits[0] = np.nan
    logits[1] = -np.inf
    logits[2, rng.integers(0, experts, experts // 2)] = np.nan
    logits[3, rng.integers(0, experts, experts // 2)] = -np.inf
    logits[4, experts // 2] = np.inf
    logits[5, [1, experts - 1]] = np.inf
    logits[6] = 3.4e38 * np.sign(logits[6])
    logits[7, :] = -np.inf
    logits[7, experts - 2] = -3.4e38  # the only one alive
    for scoring in ("softmax", "sigmoid"):
        check(logits, 5, scoring=scoring, **options)
        check(logits, 5, bias_of(rng, experts), scoring=scoring, **options)
    got = cuda(jnp.asarray(logits), 5, **options)
    for row in (0, 1):
        np.testing.assert_array_equal(got.ids[row], np.arange(5))
        np.testing.assert_array_equal(got.weights[row], np.zeros(5))
        assert float(got.identity_weight[row]) == 0
    assert_same(RouteResult(*(a[8] for a in got)), RouteResult(*(a[8] for a in clean)))


def test_dead_row_of_more_than_the_routed_experts() -> None:
    got = cuda(jnp.full((3, 12), jnp.nan), 10, num_zero_experts=4)
    np.testing.assert_array_equal(got.ids, np.tile([*range(8), -1, -1], (3, 1)))


@pytest.mark.parametrize("experts", [40, 300, 1500])
def test_biases_that_are_not_finite(rng: np.random.Generator, experts: int) -> None:
    logits, bias = logits_of(rng, 6, experts), bias_of(rng, experts)
    bias[3], bias[5], bias[7], bias[9] = np.inf, np.nan, -np.inf, 3e38
    for options in ({}, {"num_groups": 10, "topk_groups": 2}):
        got = check(logits, 4, bias, scoring="sigmoid", **options)
        np.testing.assert_array_equal(got.ids[:, :2], np.tile([3, 9], (6, 1)))


@pytest.mark.parametrize("experts", [64, 192, 768, 1500])
def test_huge_and_tiny_logits(rng: np.random.Generator, experts: int) -> None:
    for spread in (1e-6, 30.0, 1e4, 1e30):
        logits = logits_of(rng, 20, experts, spread)
        for scoring in ("softmax", "sigmoid"):
            check(logits, 8, scoring=scoring, renormalize=True)
            check(logits, 8, bias_of(rng, experts), scoring=scoring)


def test_is_what_the_xla_form_gives(rng: np.random.Generator) -> None:
    # So far apart that no rounding of a score changes the choice.
    steps = rng.permuted(np.tile(np.arange(192), (200, 1)), axis=1)
    logits = jnp.asarray((steps / 24 - 4).astype(np.float32))
    for options in ({}, {"scoring": "sigmoid", "renormalize": True, "scale": 2.0}):
        got = cuda(logits, 8, **options)
        want = route_topk(logits, 8, implementation="xla", **options)
        np.testing.assert_array_equal(got.ids, want.ids)
        assert_close(got.weights, want.weights, rtol=2e-6)


def test_vmap_and_empty_batches(rng: np.random.Generator) -> None:
    logits = jnp.asarray(logits_of(rng, 12, 100))
    got = jax.vmap(lambda x: cuda(x, 3))(logits.reshape(3, 4, 100))
    for a, b in zip(got, cuda(logits, 3), strict=True):
        assert_bitwise(a, np.asarray(b).reshape(a.shape))
    assert cuda(logits[:0], 3).ids.shape == (0, 3)


@pytest.mark.parametrize(("tokens", "experts"), [(8, 192), (300, 768), (4, 2000)])
def test_in_a_loop_of_graphs(rng: np.random.Generator, tokens: int, experts: int) -> None:
    """Six calls a step, enough for XLA to record a CUDA graph, in a loop with new inputs."""
    bias = jnp.asarray(bias_of(rng, experts))

    def step(index: jax.Array, carry: jax.Array) -> jax.Array:
        del index
        for _ in range(6):
            route = cuda(carry, 8, bias=bias, renormalize=True)
            carry = carry.at[jnp.arange(tokens)[:, None], route.ids].add(-route.weights)
        return carry

    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 4, step, x))
    start = jnp.asarray(logits_of(rng, tokens, experts, 1.0))
    want = start
    for index in range(4):
        want = step(jnp.int32(index), want)
    for _ in range(3):
        assert_bitwise(looped(start), want)
