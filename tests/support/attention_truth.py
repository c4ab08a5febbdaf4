"""Paged attention in float64 numpy, one query at a time, and random problems to hold it against.

Written from the contract alone and sharing no code with jax_hpc: it looks up only the keys a
query sees, so whatever else lies in the cache cannot enter.
"""

import dataclasses
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
GARBAGE = np.array([-1, -(2**31), 2**31 - 1, 10**6], np.int32)


def attend_one(
    q: np.ndarray,
    position: int,
    k: np.ndarray,
    v: np.ndarray,
    key_positions: np.ndarray,
    *,
    scale: float,
    window: int | None,
    logit_cap: float | None,
    sinks: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """One query [Hq, D] over the given keys [n, Hkv, D]: output [Hq, D], log-sum-exp [Hq]."""
    heads, dim = q.shape
    reach = np.inf if window is None else window
    picked = (key_positions <= position) & (key_positions > position - reach)
    out, lse = np.zeros((heads, dim)), np.full(heads, -np.inf)
    if not picked.any():
        return out, lse
    group = heads // k.shape[1]
    for head in range(heads):
        scores = k[picked, head // group] @ q[head] * scale
        if logit_cap is not None:
            scores = logit_cap * np.tanh(scores / logit_cap)
        logits = scores if sinks is None else np.append(scores, sinks[head])
        top = logits.max()
        lse[head] = top + np.log(np.exp(logits - top).sum())
        out[head] = np.exp(scores - lse[head]) @ v[picked, head // group]
    return out, lse


def tokens_of(
    pages: np.ndarray, table_row: np.ndarray, length: int, scale: Any
) -> tuple[np.ndarray, np.ndarray]:
    """A sequence's tokens [n, Hkv, D] in float64, and their positions; absent pages left out."""
    num_pages, _, size, _ = pages.shape
    values, positions = [], []
    for position in range(min(length, len(table_row) * size)):
        page, row = int(table_row[position // size]), position % size
        if not 0 <= page < num_pages:
            continue
        value = pages[page, :, row].astype(np.float64)
        if scale is not None:
            factor = np.asarray(scale).astype(np.float64)
            factor = factor[page, :, row] if factor.ndim == 3 else factor
            value = value * (factor[:, None] if factor.ndim else factor)
        values.append(value)
        positions.append(position)
    empty = np.zeros((0, pages.shape[1], pages.shape[3]))
    return (np.stack(values) if values else empty), np.array(positions, np.int64)


class Sampled(NamedTuple):
    """Truth of some rows, of one query head of each KV head; R rows."""

    out: np.ndarray
    """``[R, Hkv, D]``."""
    lse: np.ndarray
    """``[R, Hkv]``."""
    spread: np.ndarray
    """Probabilities times magnitudes of values ``[R, Hkv, D]``."""
    magnitude: np.ndarray
    """Of each row the largest sum of magnitudes of a score's terms ``[R, Hkv]``."""


@dataclasses.dataclass
class Problem:
    """A paged cache and sequences in it, as numpy arrays."""

    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    kv_lens: np.ndarray
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def rows(
        self, sequence: int, q: np.ndarray, q_scale: np.ndarray | None, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Truth of some queries [R, Hq, D] of one sequence at the given positions."""
        values = q.astype(np.float64)
        if q_scale is not None:
            values = values * q_scale.astype(np.float64)[..., None]
        o = self.options
        table, length = self.page_table[sequence], int(self.kv_lens[sequence])
        k, at = tokens_of(self.k_pages, table, length, o.get("k_scale"))
        v, _ = tokens_of(self.v_pages, table, length, o.get("v_scale"))
        scale = q.shape[-1] ** -0.5 if o.get("scale") is None else o["scale"]
        limits = {name: o.get(name) for name in ("window", "logit_cap", "sinks")}
        pairs = [
            attend_one(query, int(position), k, v, at, scale=scale, **limits)
            for query, position in zip(values, positions, strict=True)
        ]
        return np.stack([p[0] for p in pairs]), np.stack([p[1] for p in pairs])

    def sampled(self, sequence: int, q: np.ndarray, positions: np.ndarray) -> Sampled:
        """Truth of queries [R, Hkv, D] in float64, one head of each KV head, by matrix products.

        For sequences too long for :meth:`rows`. All pages exist; no option but scales of K and V.
        """
        length, dim = int(self.kv_lens[sequence]), q.shape[-1]
        used = self.page_table[sequence, : -(-length // self.k_pages.shape[2])]
        visible = np.arange(length) <= positions[:, None]
        results = []
        for head in range(q.shape[1]):
            k, v = (
                pages[used, head].reshape(-1, dim)[:length].astype(np.float64)
                * np.broadcast_to(self.options.get(name, 1.0), q.shape[1])[head]
                for pages, name in ((self.k_pages, "k_scale"), (self.v_pages, "v_scale"))
            )
            scores = np.where(visible, q[:, head] @ k.T * dim**-0.5, -np.inf)
            magnitude = np.where(visible, np.abs(q[:, head]) @ np.abs(k).T * dim**-0.5, 0)
            top = np.max(scores, axis=1, initial=-1e30)
            weights = np.exp(scores - top[:, None])
            total = weights.sum(axis=1)
            seen = np.where(total > 0, total, 1)
            with np.errstate(divide="ignore"):
                lse = top + np.log(total)
            weights /= seen[:, None]
            largest = np.max(magnitude, axis=1, initial=0)
            results.append((weights @ v, lse, weights @ np.abs(v), largest))
        return Sampled(*(np.stack(arrays, axis=1) for arrays in zip(*results, strict=True)))

    def decode(
        self, q: np.ndarray, q_scale: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Truth of decode_attention for q [B, S, Hq, D]."""
        steps = np.arange(q.shape[1])
        results = [
            self.rows(
                b, q[b], None if q_scale is None else q_scale[b], max(n, 0) - len(steps) + steps
            )
            for b, n in enumerate(self.kv_lens)
        ]
        return np.stack([r[0] for r in results]), np.stack([r[1] for r in results])

    def prefill(
        self,
        q: np.ndarray,
        q_starts: np.ndarray,
        q_lens: np.ndarray,
        q_scale: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Truth of prefill_attention for q [T, Hq, D]."""
        out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
        for b, (start, count) in enumerate(zip(q_starts, q_lens, strict=True)):
            rows = slice(start, start + count)
            if count > 0:
                positions = int(self.kv_lens[b]) - count + np.arange(count)
                scales = None if q_scale is None else q_scale[rows]
                out[rows], lse[rows] = self.rows(b, q[rows], scales, positions)
        return out, lse


def make_problem(
    rng: np.random.Generator,
    lens: list[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    width: int,
    dtype: Any,
    **options: Any,
) -> Problem:
    """A cache whose unwritten slots are NaN and whose unused table entries are garbage."""
    used = [-(-max(n, 0) // page_size) for n in lens]
    num_pages = sum(used) + 3
    order = rng.permutation(num_pages).astype(np.int32)
    table = rng.choice(GARBAGE, (len(lens), width))
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    k = np.full(shape, np.nan, np.float32)
    v = np.full(shape, np.nan, np.float32)
    next_page = 0
    for b, length in enumerate(lens):
        table[b, : used[b]] = order[next_page : next_page + used[b]]
        next_page += used[b]
        for position in range(0, max(length, 0), page_size):
            page, count = table[b, position // page_size], min(page_size, length - position)
            size = (num_kv_heads, count, head_dim)
            k[page, :, :count] = rng.normal(0, 1, size)
            v[page, :, :count] = rng.normal(0, 1, size)
    return Problem(k.astype(dtype), v.astype(dtype), table, np.array(lens, np.int32), options)
