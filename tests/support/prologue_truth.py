"""Independent float64 numpy of the attention prologue, one token and head at a time."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


class Prologue(NamedTuple):
    """Unrounded q and k after norm and rotation, and v, float64."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def prologue(
    qkv: np.ndarray,
    q_norm: np.ndarray | None,
    k_norm: np.ndarray | None,
    cos_sin: np.ndarray,
    positions: np.ndarray,
    kv_heads: int,
    head_dim: int,
    *,
    eps: float = 1e-6,
    norm: str | None = "before",
    rope_style: str = "half",
) -> Prologue:
    rows = np.asarray(qkv, np.float64).reshape(len(qkv), -1, head_dim)
    heads = rows.shape[1] - 2 * kv_heads
    out = rows.copy()
    for t, position in enumerate(positions):
        angle_row = np.asarray(cos_sin[min(max(position, 0), len(cos_sin) - 1)], np.float64)
        for h in range(heads + kv_heads):
            weight = q_norm if h < heads else k_norm
            x = rows[t, h]
            if norm == "before":
                x = rms_norm(x, weight, eps)
            x = rotate(x, angle_row, rope_style)
            if norm == "after":
                x = rms_norm(x, weight, eps)
            out[t, h] = x
    return Prologue(out[:, :heads], out[:, heads : heads + kv_heads], out[:, heads + kv_heads :])


def rms_norm(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    x = x / np.sqrt(np.mean(x**2) + eps)
    return x if weight is None else x * np.asarray(weight, np.float64)


def rotate(x: np.ndarray, angle_row: np.ndarray, style: str) -> np.ndarray:
    """Multiply pairs of values, taken as complex numbers, by cos + i sin."""
    half = len(angle_row) // 2
    turn = angle_row[:half] + 1j * angle_row[half:]
    first = np.arange(half) if style == "half" else 2 * np.arange(half)
    second = first + half if style == "half" else first + 1
    pairs = (x[first] + 1j * x[second]) * turn
    out = x.copy()
    out[first], out[second] = pairs.real, pairs.imag
    return out


def append(pages: np.ndarray, slots: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A copy of ``pages [P, Hkv, N, ...]`` with ``values [T, Hkv, ...]`` written at ``slots``."""
    pages = np.asarray(pages).astype(np.float64)
    num_pages, _, page_size = pages.shape[:3]
    for slot, value in zip(slots, values, strict=True):
        if 0 <= slot < num_pages * page_size:
            pages[slot // page_size, :, slot % page_size] = value
    return pages


def spacing(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Distance between neighbours in ``dtype`` at each value: twice the rounding error."""
    bits = 3 if np.dtype(dtype) == E4M3 else ml_dtypes.finfo(dtype).nmant
    floor = float(ml_dtypes.finfo(dtype).smallest_normal)
    return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(values), floor))) - bits)
