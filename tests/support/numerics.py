"""Comparisons that say where and by how much two arrays differ."""

from typing import Any

import numpy as np


def assert_close(got: Any, want: Any, *, atol: Any = 0.0, rtol: float = 0.0) -> None:
    """Assert ``|got - want| <= atol + rtol * |want|``; NaN and infinities must agree.

    ``atol`` may be an array of ``want``'s shape: a bound per element.
    """
    got64, want64 = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got64.shape == want64.shape, f"shape {got64.shape}, expected {want64.shape}"
    same = (got64 == want64) | (np.isnan(got64) & np.isnan(want64))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(got64 - want64))
        bound = np.broadcast_to(np.asarray(atol + rtol * np.abs(want64), np.float64), error.shape)
        excess = np.where(same, -np.inf, error - bound)
    excess = np.where(np.isnan(excess), np.inf, excess)
    if error.size and np.max(excess) > 0:
        worst = np.unravel_index(int(np.argmax(excess)), error.shape)
        where = tuple(int(i) for i in worst)
        raise AssertionError(
            f"{int(np.sum(excess > 0))} of {error.size} elements differ; worst at {where}: "
            f"got {got64[worst]!r}, expected {want64[worst]!r}, "
            f"error {error[worst]:.3e}, allowed {bound[worst]:.3e}"
        )


def assert_bitwise(got: Any, want: Any) -> None:
    """Assert equal shape, dtype and bits."""
    a, b = np.asarray(got), np.asarray(want)
    assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{a.dtype}{a.shape} vs {b.dtype}{b.shape}"
    bits = np.dtype(f"u{a.dtype.itemsize}")
    different = np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)
    if np.any(different):
        where = tuple(int(i[0]) for i in np.nonzero(different))
        raise AssertionError(
            f"{int(different.sum())} of {a.size} elements differ in bits; first at {where}: "
            f"got {a[where]!r}, expected {b[where]!r}"
        )


def cosine(got: Any, want: Any) -> float:
    """Cosine between two arrays taken as vectors, in float64."""
    a = np.asarray(got).astype(np.float64).ravel()
    b = np.asarray(want).astype(np.float64).ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))
