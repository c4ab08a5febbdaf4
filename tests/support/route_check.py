"""Any choice of experts against float64, with what float32 cannot tell apart accepted."""

import dataclasses
from typing import Any

import numpy as np

from tests.support.numerics import assert_close
from tests.support.route_truth import Routed, best, sigmoid, softmax

MAX = float(np.finfo(np.float32).max)
ULP = 2.0**-24
TINY = 2.0**-126  # scores below the smallest normal float32 count as equal
EPS = 1e-20


@dataclasses.dataclass
class Truth:
    """Of each token and expert: score, what decides the choice, and how exact float32 is there."""

    scores: np.ndarray
    keys: np.ndarray  # -inf outside the chosen groups
    relative: np.ndarray  # bound on the relative error of a float32 score
    alive: np.ndarray  # tokens with a finite logit
    clear: np.ndarray  # tokens whose groups float32 tells apart


def truth_of(
    logits: np.ndarray,
    bias: np.ndarray | None,
    scoring: str = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
) -> Truth:
    experts = logits.shape[1]
    clean = np.nan_to_num(logits, nan=-np.inf, posinf=MAX, neginf=-np.inf).astype(np.float64)
    alive = np.any(clean > -np.inf, axis=1)
    clean = np.where(alive[:, None], clean, 0.0)
    if scoring == "softmax":
        scores = softmax(clean)
        # The difference to the largest logit, the additions of one thread, and a few roundings.
        distance = np.minimum(clean.max(axis=1, keepdims=True) - clean, 1e3)
        relative = ULP * (distance + 16 + min(experts / 32, 32) + experts / 256)
    else:
        with np.errstate(over="ignore"):
            scores = sigmoid(clean)
        relative = np.full_like(scores, 12 * ULP)
    keys = scores
    if bias is not None:
        keys = np.nan_to_num(scores + bias.astype(np.float64), nan=-MAX, posinf=MAX, neginf=-MAX)
        keys = np.clip(keys, -MAX, MAX)
    clear = np.ones(len(keys), bool)
    if topk_groups < num_groups:
        slack = (scores * relative).max(axis=1)
        keys, clear = _best_groups(keys, slack, num_groups, topk_groups)
    return Truth(scores, keys, relative, alive, clear)


def _best_groups(
    keys: np.ndarray, slack: np.ndarray, num_groups: int, topk_groups: int
) -> tuple[np.ndarray, np.ndarray]:
    members = keys.reshape(len(keys), num_groups, -1)
    strength = np.sort(members, axis=2)[:, :, -2:].sum(axis=2)
    order = np.argsort(-strength, axis=1, kind="stable")
    ranked = np.take_along_axis(strength, order, 1)
    last, next_ = ranked[:, topk_groups - 1], ranked[:, topk_groups]
    allowed = 4 * slack + 4 * ULP * (np.abs(last) + np.abs(next_))
    chosen = np.zeros(strength.shape, bool)
    np.put_along_axis(chosen, order[:, :topk_groups], True, 1)
    return np.where(chosen[:, :, None], members, -np.inf).reshape(
        keys.shape
    ), last - next_ > allowed


def choose(
    logits: np.ndarray,
    k: int,
    *,
    bias: np.ndarray | None = None,
    renormalize: bool = False,
    scale: float = 1.0,
    num_zero_experts: int = 0,
    **how: Any,
) -> Routed:
    """The choice itself, in float64."""
    truth = truth_of(logits, bias, **how)
    ids = np.where(truth.alive[:, None], best(truth.keys, k), np.arange(k))
    weights = _weights(truth, ids, renormalize, scale)
    is_zero = ids >= logits.shape[1] - num_zero_experts
    return Routed(
        np.where(is_zero, -1, ids),
        np.where(is_zero, 0.0, weights),
        np.where(is_zero, weights, 0.0).sum(1),
    )


def _weights(truth: Truth, ids: np.ndarray, renormalize: bool, scale: float) -> np.ndarray:
    weights = np.take_along_axis(truth.scores, ids, 1)
    if renormalize:
        weights = weights / (weights.sum(1, keepdims=True) + EPS)
    return np.where(truth.alive[:, None], weights * scale, 0.0)


def assert_route(
    got: Any,
    logits: np.ndarray,
    k: int,
    *,
    bias: np.ndarray | None = None,
    renormalize: bool = False,
    scale: float = 1.0,
    num_zero_experts: int = 0,
    **how: Any,
) -> None:
    """Assert a choice of experts.

    An expert may stand in another's place only where their biased scores differ by less than the
    roundings of float32 scores allow; weights are compared with those of the experts that are
    there. Tokens whose groups are that close are left out, and must be few.
    """
    truth = truth_of(logits, bias, **how)
    assert np.mean(truth.clear) > 0.9, "too many tokens whose groups float32 cannot tell apart"
    ids = np.asarray(got.ids).astype(np.int64)
    want = np.where(truth.alive[:, None], best(truth.keys, k), np.arange(k))
    first_zero = logits.shape[1] - num_zero_experts
    # Zero experts come back as -1, whichever it was: the expected one is taken to be there, or
    # else the zero expert whose score is nearest.
    actual = np.where(ids >= 0, ids, want)
    for token, place in np.argwhere((ids < 0) & (want < first_zero)):
        distance = np.abs(truth.keys[token, first_zero:] - truth.keys[token, want[token, place]])
        assert distance.size, f"id -1 at token {token}, place {place}, without zero experts"
        actual[token, place] = first_zero + np.argmin(distance)
    _assert_ids(truth, ids, actual, want, first_zero)
    weights = _weights(truth, actual, renormalize, scale)
    is_zero = actual >= first_zero
    identity = np.where(is_zero, weights, 0.0).sum(1)
    relative = 2 * np.take_along_axis(truth.relative, actual, 1).max(1, keepdims=True) + 16 * ULP
    least = abs(scale) * (TINY / EPS if renormalize else 2 * TINY)
    clear = truth.clear[:, None]
    assert_close(
        np.where(clear, got.weights, 0.0),
        np.where(clear & ~is_zero, weights, 0.0),
        atol=relative * np.abs(weights) + least,
    )
    assert_close(
        np.where(truth.clear, got.identity_weight, 0.0),
        np.where(truth.clear, identity, 0.0),
        atol=relative[:, 0] * np.abs(identity) + k * least,
    )
    assert not np.any(np.asarray(got.weights)[is_zero]), "a zero expert has a weight"


def _assert_ids(
    truth: Truth, ids: np.ndarray, actual: np.ndarray, want: np.ndarray, first_zero: int
) -> None:
    assert np.all((ids >= -1) & (ids < first_zero)), "an id is out of range"
    np.testing.assert_array_equal(
        ids[~truth.alive], np.where(want < first_zero, want, -1)[~truth.alive]
    )

    def at(values: np.ndarray, which: np.ndarray) -> np.ndarray:
        return np.take_along_axis(values, which, 1)

    with np.errstate(invalid="ignore"):
        error = np.abs(at(truth.keys, actual) - at(truth.keys, want))
    slack = at(truth.scores * truth.relative, actual) + at(truth.scores * truth.relative, want)
    slack += 2 * ULP * np.abs(at(truth.keys, want)) + 2 * TINY
    wrong = (actual != want) & ~(error <= slack) & (truth.alive & truth.clear)[:, None]
    for token, place in np.argwhere(wrong)[:1]:
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} ids differ; first at token {token}, place {place}: "
            f"got {actual[token, place]} with {truth.keys[token, actual[token, place]]!r}, "
            f"expected {want[token, place]} with {truth.keys[token, want[token, place]]!r}, "
            f"allowed {slack[token, place]:.3e}"
        )
    chosen = np.sort(np.where(ids >= 0, ids, -1 - np.arange(ids.shape[1])), axis=1)
    assert np.all(np.diff(chosen, axis=1)), "an expert is chosen twice"
