"""Independent float64 numpy of the MoE layer, one (token, choice) pair at a time.

Quantises at the stated points with ml_dtypes; everything between them is float64.

A value of the intermediate near a tie of e4m3 may round to either side, since products are added
up in another order, and on tensor cores with fewer bits than float32 has. ``slack`` says how far
that may move each result: one e4m3 step of each such value, times its weight.
"""

import functools
from typing import Any

import ml_dtypes
import numpy as np

from jax_hpc.ops.fused_moe import DenseExperts, Experts, Fp8BlockExperts, Fp8TensorExperts

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


NEAR = 2.0**-9
"""How far a sum may be off, in parts of the norm of what is added up."""


def moe(
    x: Any,
    ids: Any,
    weights: Any,
    experts: Experts,
    *,
    x_scale: Any = None,
    offset: int = 0,
    shared: Any = None,
    identity: Any = None,
) -> np.ndarray:
    return moe_and_slack(
        x,
        ids,
        weights,
        experts,
        x_scale=x_scale,
        offset=offset,
        shared=shared,
        identity=identity,
    )[0]


def moe_and_slack(
    x: Any,
    ids: Any,
    weights: Any,
    experts: Experts,
    *,
    x_scale: Any = None,
    offset: int = 0,
    shared: Any = None,
    identity: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    x, ids = np.asarray(x), np.asarray(ids).astype(np.int64)
    weights = np.asarray(weights, np.float64)
    num_experts = experts.down.shape[0]
    if isinstance(experts, Fp8TensorExperts) and x_scale is None:
        x_scale = experts.input_scale
    matrices_of = functools.cache(lambda expert: matrices(experts, expert))
    out, slack = np.zeros(x.shape), np.zeros(x.shape)
    for t in range(len(x)):
        row_scale = None if x_scale is None else np.asarray(x_scale, np.float64)
        if row_scale is not None and row_scale.ndim == 2:
            row_scale = row_scale[t]
        for k in range(ids.shape[1]):
            expert = ids[t, k] - offset
            if ids[t, k] >= 0 and 0 <= expert < num_experts:
                own = matrices_of(int(expert))
                value, spare = network(x[t], row_scale, experts, int(expert), own)
                out[t] += weights[t, k] * value
                slack[t] += abs(weights[t, k]) * spare
        if shared is not None:
            out[t] += np.asarray(shared[t], np.float64)
        if identity is not None:
            own = x[t].astype(np.float64)
            if x.dtype == E4M3:
                own = own * spread(row_scale, x.shape[1])
            out[t] += float(identity[t]) * own
    return out, slack


def matrices(experts: Experts, e: int) -> list[np.ndarray]:
    """An expert's gate, up and down in float64, dequantised."""
    if isinstance(experts, Fp8BlockExperts):
        return [block_weight(experts, e, half) for half in (0, 1, None)]
    weights = [
        weight64(w) for w in (experts.gate_up[e, 0], experts.gate_up[e, 1], experts.down[e])
    ]
    if isinstance(experts, DenseExperts):
        return weights
    scales = (experts.gate_scale[e], experts.up_scale[e], experts.down_scale[e])
    return [weight * float(scale) for weight, scale in zip(weights, scales, strict=True)]


def network(
    x: np.ndarray, scale: Any, experts: Experts, e: int, weights: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """An expert's output for one row, and the slack of it; weights: its :func:`matrices`."""
    gate, up, down = weights
    if isinstance(experts, DenseExperts):
        hidden = silu(gate @ x.astype(np.float64)) * (up @ x.astype(np.float64))
        hidden = hidden.astype(x.dtype).astype(np.float64)
        out = down @ hidden
        return out, np.zeros_like(out)
    if isinstance(experts, Fp8TensorExperts):
        own = x if x.dtype == E4M3 else quantize(x, scale)
        own = own.astype(np.float64) * scale
        act = float(np.broadcast_to(experts.act_scale, len(experts.down))[e])
        return through_e4m3(own, gate, up, down, lambda v: quantize(v, act).astype(float) * act)
    own = x.astype(np.float64) * spread(scale, len(x)) if x.dtype == E4M3 else by_groups(x)
    return through_e4m3(own, gate, up, down, by_groups)


def through_e4m3(
    x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, rounded: Any
) -> tuple[np.ndarray, np.ndarray]:
    g, u = gate @ x, up @ x
    value = silu(g) * u
    off_g, off_u = (NEAR * np.sqrt(np.square(w) @ np.square(x)) for w in (gate, up))
    near = off_g * np.abs(u) + off_u * np.abs(silu(g)) + NEAR * np.abs(value)
    step = np.abs(rounded(value + near) - rounded(value - near))
    return down @ rounded(value), np.abs(down) @ step


def block_weight(experts: Fp8BlockExperts, e: int, half: int | None) -> np.ndarray:
    rows = experts.block_rows
    if half is not None:
        weight, scale = experts.gate_up[e, half], experts.gate_up_scale[e, half]
        block = (rows, 128)
    else:
        weight, scale, block = experts.down[e], experts.down_scale[e], (128, rows)
    weight, scale = weight64(weight), np.asarray(scale, np.float64)
    i, j = np.indices(weight.shape)
    return weight * scale[i // block[0], j // block[1]]


def by_groups(x: np.ndarray) -> np.ndarray:
    """Quantised with amax / 448 per 128 values, and back."""
    out = np.zeros(len(x))
    for start in range(0, len(x), 128):
        part = x[start : start + 128].astype(np.float32)
        amax = np.abs(part).max()
        scale = np.float32(1.0) if amax == 0 else amax * np.float32(1 / 448)
        out[start : start + 128] = quantize(part, scale).astype(np.float64) * float(scale)
    return out


def quantize(x: np.ndarray, scale: Any) -> np.ndarray:
    scaled = x.astype(np.float32) * (np.float32(1.0) / np.float32(scale))
    return np.clip(scaled, -448, 448).astype(E4M3)


def spread(scale: Any, size: int) -> np.ndarray:
    return np.repeat(np.atleast_1d(scale), 128)[:size] if np.ndim(scale) else np.full(size, scale)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def weight64(weight: Any) -> np.ndarray:
    return np.asarray(weight).astype(np.float64)
