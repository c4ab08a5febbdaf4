"""route_topk against the models' own formulas in float64, and at its edges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import _registry
from jax_hpc.ops.route_topk import RouteResult, route_topk
from jax_hpc.ops.route_topk.cases import CASES, Case
from jax_hpc.ops.route_topk.primitive import MOST_EXPERTS
from tests.support import route_check, route_truth
from tests.support.numerics import assert_bitwise, assert_close


def route(logits, *args, **options) -> RouteResult:
    bias = options.pop("bias", None)
    bias = None if bias is None else jnp.asarray(bias, jnp.float32)
    call = functools.partial(route_topk, **options)
    return jax.jit(lambda x, b: call(x, *args, bias=b))(jnp.asarray(logits, jnp.float32), bias)


def truth(case: Case, logits: np.ndarray, bias: np.ndarray) -> route_truth.Routed:
    options = case.options
    if case.name == "qwen3":
        return route_truth.qwen3(logits, case.k)
    if case.name == "hy3":
        return route_truth.hy3(logits, bias, case.k, options["scale"])
    if case.name.startswith("longcat"):
        zero = options["num_zero_experts"]
        return route_truth.longcat(logits, bias, case.k, options["scale"], zero)
    groups, chosen = options["num_groups"], options["topk_groups"]
    return route_truth.deepseek_v3(logits, bias, case.k, options["scale"], groups, chosen)


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def separated_logits(rng: np.random.Generator, tokens: int, experts: int) -> np.ndarray:
    """Random logits at least 1e-3 apart in a row: float32 and float64 then choose alike."""
    steps = rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)
    return (steps * 8.0 / experts - 4.0 + rng.uniform(0, 0.004, steps.shape)).astype(np.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_models(case: Case, rng: np.random.Generator) -> None:
    logits = separated_logits(rng, 33, case.experts)
    # Biases on a coarse grid and small against the scores' own steps, so that rounding to
    # float32 cannot change the choice; still large enough to change it against no bias.
    s = route_truth.softmax(logits) if "scoring" not in case.options else None
    spread = 0.5 if s is None else float(np.max(s)) / 2
    bias = (np.round(rng.uniform(-1, 1, case.experts), 2) * spread).astype(np.float32)
    got = route(logits, case.k, bias=bias if case.has_bias else None, **case.options)
    want = truth(case, logits, bias if case.has_bias else np.zeros_like(bias))
    assert got.ids.dtype == jnp.int32 and got.weights.dtype == jnp.float32
    assert_close(got.ids, want.ids)
    assert_close(got.weights, want.weights, rtol=2e-6, atol=1e-12)
    assert_close(got.identity_weight, want.identity_weight, rtol=2e-6, atol=1e-12)
    if case.has_bias:
        assert not np.array_equal(want.ids, truth(case, logits, np.zeros_like(bias)).ids)
    if "num_zero_experts" in case.options:
        assert np.any(want.ids == -1) and np.any(want.ids >= 0)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (33, 33), (96, 7), (1200, 12)])
def test_every_option_at_once(rng, scoring, experts, k) -> None:
    logits = rng.normal(0, 3, (60, experts)).astype(np.float32)
    logits[3], logits[4, ::2], logits[5, experts // 2] = np.nan, -np.inf, np.inf
    bias = rng.normal(0, 0.05, experts).astype(np.float32)
    groups = 3 if experts % 3 == 0 and k < experts else 1
    options = {"scoring": scoring, "num_groups": groups, "topk_groups": max(1, groups - 1)}
    for b in (None, bias):
        for zero in (0, experts // 3):
            options |= {"num_zero_experts": zero, "renormalize": zero > 0, "scale": 2.5}
            got = route(logits, k, bias=b, **options)
            route_check.assert_route(got, logits, k, bias=b, **options)


def test_the_check_notices_a_wrong_choice(rng) -> None:
    logits = rng.normal(0, 3, (4, 64)).astype(np.float32)
    want = route_check.choose(logits, 5)
    ids = want.ids.copy()
    ids[2, 1], ids[2, 2] = ids[2, 2], ids[2, 1]
    with pytest.raises(AssertionError, match="token 2, place 1"):
        route_check.assert_route(RouteResult(ids, want.weights, want.identity_weight), logits, 5)
    weights = want.weights.copy()
    weights[3, 0] *= 1 + 1e-5
    with pytest.raises(AssertionError, match=r"worst at \(3, 0\)"):
        route_check.assert_route(RouteResult(want.ids, weights, want.identity_weight), logits, 5)


def test_renormalized_softmax_is_the_softmax_of_the_chosen_logits(rng) -> None:
    logits = separated_logits(rng, 7, 32)
    got = route(logits, 4, renormalize=True)
    chosen = np.take_along_axis(logits, np.asarray(got.ids), 1)
    assert_close(got.weights, route_truth.softmax(chosen), rtol=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_ties_go_to_the_lower_id(scoring) -> None:
    logits = np.zeros((2, 16), np.float32)
    logits[1, [3, 5, 11]] = 1.0
    got = route(logits, 5, scoring=scoring)
    assert_close(got.ids, [[0, 1, 2, 3, 4], [3, 5, 11, 0, 1]])


def test_tied_groups_go_to_the_lower_id() -> None:
    got = route(np.zeros((1, 16)), 4, scoring="sigmoid", num_groups=4, topk_groups=2)
    assert_close(got.ids, [[0, 1, 2, 3]])


def test_groups_are_judged_by_their_two_best() -> None:
    # Group 0 holds the single best expert, group 1 the best pair; equal chances elsewhere.
    logits = np.asarray([[6.0, -9, -9, -9, 2.0, 2.0, -9, -9, -9, -9, -9, -9]], np.float32)
    got = route(logits, 3, scoring="sigmoid", num_groups=3, topk_groups=1)
    assert_close(got.ids, [[4, 5, 6]])


def test_bias_of_minus_infinity_excludes_but_never_leaves_the_groups() -> None:
    bias = np.full(8, -np.inf, np.float32)
    bias[[6, 7]] = 0.0
    got = route(np.zeros((1, 8)), 3, bias=bias, num_groups=2, topk_groups=1)
    assert_close(got.ids, [[6, 7, 4]])


def test_nan_and_infinite_logits(rng) -> None:
    logits = rng.standard_normal((5, 12)).astype(np.float32)
    clean = route(logits, 3)
    dirty = logits.copy()
    dirty[0, :] = np.nan  # nothing finite
    dirty[1, :] = -np.inf
    dirty[2, [4, 7]] = np.nan  # counts as -inf
    dirty[3, 9] = np.inf  # counts as the largest float
    got = route(dirty, 3, renormalize=False)
    assert_close(got.ids[:2], [[0, 1, 2]] * 2)
    assert_close(got.weights[:2], np.zeros((2, 3)))
    rest = np.where(np.isnan(dirty[2]), -np.inf, dirty[2])[None]
    want = route_truth.best(route_truth.softmax(rest), 3)
    assert_close(got.ids[2:3], want)
    assert_close(
        got.weights[2:3].sum(), np.sort(route_truth.softmax(rest))[0, -3:].sum(), rtol=1e-6
    )
    assert_close(got.ids[3, 0], 9)
    assert_close(got.weights[3], [1.0, 0.0, 0.0])
    for field in ("ids", "weights"):  # the row beside them is untouched, to the bit
        assert_bitwise(getattr(got, field)[4], getattr(clean, field)[4])


@pytest.mark.parametrize("renormalize", [False, True])
def test_dead_row_of_a_longcat_router_has_no_weight(renormalize) -> None:
    bias = np.linspace(0, 1, 12).astype(np.float32)
    options = {"bias": bias, "num_zero_experts": 4, "scale": 6.0, "renormalize": renormalize}
    got = route(np.full((2, 12), np.nan), 3, **options)
    assert_close(got.ids, [[0, 1, 2]] * 2)
    assert_close(got.weights, np.zeros((2, 3)))
    assert_close(got.identity_weight, np.zeros(2))


def test_all_chosen_are_zero_experts() -> None:
    logits = np.asarray([[0.0, 0, 0, 0, 9, 9, 9]], np.float32)
    got = route(logits, 3, num_zero_experts=3, scale=6.0)
    assert_close(got.ids, [[-1, -1, -1]])
    assert_close(got.weights, [[0.0, 0.0, 0.0]])
    assert_close(got.identity_weight, route_truth.softmax(logits)[:, 4:].sum(1) * 6.0, rtol=1e-6)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(0, 8, 2), (1, 1, 1), (3, 16, 16)])
def test_edge_sizes(tokens, experts, k, rng) -> None:
    logits = separated_logits(rng, tokens, experts)
    got = route(logits, k)
    assert_close(got.ids, route_truth.best(logits, k))
    assert got.identity_weight.shape == (tokens,)


def test_eager_and_jit_agree(rng) -> None:
    logits = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)
    for a, b in zip(route_topk(logits, 2), route(logits, 2), strict=True):
        assert_bitwise(a, b)


def test_vmap_folds_into_tokens(rng) -> None:
    logits = jnp.asarray(rng.standard_normal((3, 4, 8)), jnp.float32)
    got = jax.vmap(lambda x: route_topk(x, 2))(logits)
    for a, b in zip(got, route(logits.reshape(12, 8), 2), strict=True):
        assert_bitwise(a, b.reshape(a.shape))
    with pytest.raises(NotImplementedError, match="vmap over argument 'bias'"):
        jax.vmap(lambda b: route_topk(logits[0], 2, bias=b))(jnp.zeros((3, 8)))


LOGITS = np.zeros((2, 12), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"k": 0}, ValueError, "'k' must be 1 <= k <= E = 12, got 0"),
        ({"k": 2.0}, TypeError, r"'k' must be a Python int \(it is static\), got 2.0"),
        ({"k": np.ones((), np.int32)}, TypeError, r"'k' must be .*, got an array int32\[\]"),
        ({"num_groups": 4.0}, TypeError, "'num_groups' must be a Python int"),
        ({"scale": "2"}, TypeError, "'scale' must be a Python number"),
        ({"k": 13}, ValueError, "'k' must be 1 <= k <= E = 12, got 13"),
        ({"logits": LOGITS[0]}, ValueError, r"'logits' must have shape \[T, E\]"),
        ({"logits": LOGITS.astype(np.float16)}, TypeError, "'logits' must be float32"),
        ({"bias": LOGITS[0, :4]}, ValueError, "'bias' must have shape .*E = 12 from 'logits'"),
        ({"bias": LOGITS[0].astype(np.float16)}, TypeError, "'bias' must be float32"),
        ({"scoring": "tanh"}, ValueError, "'scoring' must be one of 'softmax', 'sigmoid'"),
        ({"scale": float("nan")}, ValueError, "'scale' must be finite"),
        ({"num_zero_experts": 12}, ValueError, "0 <= num_zero_experts < E = 12, got 12"),
        ({"num_zero_experts": -1}, ValueError, "0 <= num_zero_experts"),
        ({"num_groups": 5}, ValueError, "'num_groups' must be a divisor of E = 12, got 5"),
        ({"num_groups": 0}, ValueError, "'num_groups' must be a divisor of E = 12, got 0"),
        ({"num_groups": 12}, ValueError, "each group has at least 2 of the 12 experts"),
        ({"num_groups": 3, "topk_groups": 4}, ValueError, "topk_groups <= num_groups = 3"),
        ({"topk_groups": 0}, ValueError, "1 <= topk_groups <= num_groups = 1"),
        ({"num_groups": 4, "k": 4}, ValueError, "topk_groups .* 3 experts per group >= k = 4"),
    ],
)
def test_refuses(change, error, words) -> None:
    arguments = {"logits": LOGITS, "k": 2, **change}
    with pytest.raises(error, match=f"route_topk: argument .*{words}"):
        route_topk(arguments.pop("logits"), arguments.pop("k"), **arguments)


def test_refuses_a_kernel_and_a_gradient() -> None:
    most = MOST_EXPERTS
    with pytest.raises(NotImplementedError, match=f"at most {most} experts, got {most + 1}"):
        jax.eval_shape(lambda x: route_topk(x, 2, implementation="cuda"), shape(1, most + 1))
    with pytest.raises(NotImplementedError, match="T must be at most 2147482624, got 2147482625"):
        jax.eval_shape(lambda x: route_topk(x, 2, implementation="cuda"), shape(2**31 - 1023, 4))
    with pytest.raises(NotImplementedError, match="route_topk cannot be differentiated"):
        jax.grad(lambda x: route_topk(x, 2).weights.sum())(jnp.zeros((1, 4)))


@pytest.mark.parametrize("with_bias", [False, True])
def test_what_the_handler_is_given(monkeypatch, with_bias) -> None:
    monkeypatch.setattr(_registry, "unusable_reason", lambda: None)
    bias = shape(12) if with_bias else None

    def lower(**options) -> str:
        call = functools.partial(route_topk, implementation="cuda", **options)
        traced = jax.jit(lambda x, b: call(x, bias=b)).trace(shape(5, 12), bias)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    # Attributes are numbers of fixed types, whichever types they were given as.
    for number, real in ((int, float), (np.int64, np.float64), (np.uint8, np.float32)):
        text = lower(
            k=number(3),
            scoring="sigmoid",
            renormalize=True,
            scale=real(2.5),
            num_zero_experts=number(4),
            num_groups=number(3),
            topk_groups=number(2),
        )
        call = next(line for line in text.splitlines() if "@jax_hpc.route_topk.v1" in line)
        for attribute in (
            "k = 3 : i32",
            "scoring = 1 : i32",
            "renormalize = true",
            "scale = 2.500000e+00 : f32",
            "num_zero_experts = 4 : i32",
            "num_groups = 3 : i32",
            "topk_groups = 2 : i32",
        ):
            assert attribute in call, call
        operands = "tensor<5x12xf32>, tensor<12xf32>" if with_bias else "tensor<5x12xf32>"
        types = f"({operands}) -> (tensor<5x3xi32>, tensor<5x3xf32>, tensor<5xf32>)"
        assert call.rstrip().endswith(types), call
    assert "scoring = 0 : i32" in lower(k=2)
