"""Independent float64 numpy of the routers of real models, written from their own formulas."""

from typing import NamedTuple

import numpy as np


class Routed(NamedTuple):
    ids: np.ndarray
    weights: np.ndarray
    identity_weight: np.ndarray


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest per row, best first, ties to the lower index."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def qwen3(logits: np.ndarray, k: int) -> Routed:
    p = softmax(logits)
    ids = best(p, k)
    w = np.take_along_axis(p, ids, 1)
    return Routed(ids, w / w.sum(axis=1, keepdims=True), np.zeros(len(logits)))


def hy3(logits: np.ndarray, bias: np.ndarray, k: int, scale: float) -> Routed:
    s = sigmoid(logits)
    ids = best(s + bias, k)
    w = np.take_along_axis(s, ids, 1)
    return Routed(ids, w / (w.sum(1, keepdims=True) + 1e-20) * scale, np.zeros(len(logits)))


def longcat(logits: np.ndarray, bias: np.ndarray, k: int, scale: float, zero: int) -> Routed:
    routed = logits.shape[1] - zero
    p = softmax(logits)
    ids = best(p + bias, k)
    w = np.take_along_axis(p, ids, 1) * scale
    is_zero = ids >= routed
    return Routed(
        np.where(is_zero, -1, ids), np.where(is_zero, 0.0, w), np.where(is_zero, w, 0.0).sum(1)
    )


def deepseek_v3(
    logits: np.ndarray, bias: np.ndarray, k: int, scale: float, groups: int, topk_groups: int
) -> Routed:
    s = sigmoid(logits)
    ids = np.zeros((len(logits), k), int)
    for t, biased in enumerate(s + bias):
        members = biased.reshape(groups, -1)
        strength = np.sort(members, axis=1)[:, -2:].sum(axis=1)
        chosen = np.argsort(-strength, kind="stable")[:topk_groups]
        masked = np.full_like(members, -np.inf)
        masked[chosen] = members[chosen]
        ids[t] = best(masked.reshape(1, -1), k)[0]
    w = np.take_along_axis(s, ids, 1)
    return Routed(ids, w / (w.sum(1, keepdims=True) + 1e-20) * scale, np.zeros(len(logits)))
