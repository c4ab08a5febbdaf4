"""From a checkpoint's one matrix per expert and projection to the pytrees of weights.py.

Experts are read one after the other into one preallocated array per layer, so that loading
holds one expert beside the layer being filled, never a second copy of the model.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_hpc._checks import check_choice
from jax_hpc.ops.fused_moe.weights import (
    BLOCK_ROWS,
    GROUP,
    DenseExperts,
    Fp8BlockExperts,
    Fp8TensorExperts,
)

PROJECTIONS = ("gate", "up", "down")
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class ExpertTensors:
    """One expert as checkpoints store it.

    gate, up: ``[I, H]``; down: ``[H, I]``.
    *_scale: weight scales that multiply: one number (per tensor), or one per block
      ``[ceil(rows / 128), ceil(columns / 128)]`` (``weight_scale_inv`` of block fp8). None where
      the checkpoint has none.
    *_input_scale: static activation scales, one number each, or None.
    """

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate_scale: np.ndarray | None = None
    up_scale: np.ndarray | None = None
    down_scale: np.ndarray | None = None
    gate_input_scale: np.ndarray | None = None
    up_input_scale: np.ndarray | None = None
    down_input_scale: np.ndarray | None = None


ReadExpert = Callable[[int], ExpertTensors]
"""Reads expert ``index`` of a layer (of this rank's experts, counted from 0)."""


def load_dense_experts(num_experts: int, read: ReadExpert) -> DenseExperts:
    """Stack the bf16 or float32 experts of a layer.

    Raises:
      ValueError: an expert's shape or dtype differs from the first one's; the message names it.
    """
    layer = _Layer(num_experts)
    for index in range(num_experts):
        layer.put(index, read(index))
    return DenseExperts(jnp.asarray(layer.gate_up), jnp.asarray(layer.down))


def load_fp8_tensor_experts(num_experts: int, read: ReadExpert) -> Fp8TensorExperts:
    """Stack the per-tensor fp8 experts of a layer (Hy3-FP8).

    ``input_scale`` becomes the largest of all experts' gate and up, ``act_scale`` that of down.

    Raises:
      ValueError: a scale is missing, or not finite and > 0, or a shape or dtype does not fit; the
        message names expert and projection.
    """
    layer = _Layer(num_experts, _E4M3)
    scales = np.empty((num_experts, 3), np.float32)
    inputs = np.empty((num_experts, 3), np.float32)
    for index in range(num_experts):
        tensors = read(index)
        layer.put(index, tensors)
        for p, name in enumerate(PROJECTIONS):
            scales[index, p] = _scalar(index, name, "weight scale", tensors)
            inputs[index, p] = _scalar(index, name, "input scale", tensors)
    for p, name in enumerate(PROJECTIONS):
        check_scales(f"{name} weight scale", scales[:, p])
        check_scales(f"{name} input scale", inputs[:, p])
    return Fp8TensorExperts(
        gate_up=jnp.asarray(layer.gate_up),
        down=jnp.asarray(layer.down),
        gate_scale=jnp.asarray(scales[:, 0]),
        up_scale=jnp.asarray(scales[:, 1]),
        down_scale=jnp.asarray(scales[:, 2]),
        input_scale=jnp.asarray(inputs[:, :2].max()),
        act_scale=jnp.asarray(inputs[:, 2]),
    )


def load_fp8_block_experts(
    num_experts: int, read: ReadExpert, *, block_rows: int = 128
) -> Fp8BlockExperts:
    """Stack the block fp8 experts of a layer (Qwen3-FP8, LongCat-Flash-FP8).

    Args:
      block_rows: rows of I per scale. 64 for shards that start inside a 128 block: ``read``
        then gives every scale twice along I, cut to the shard.

    Raises:
      ValueError: a scale is missing, or not finite and > 0, or a shape or dtype does not fit; the
        message names expert and projection.
    """
    check_choice("load_fp8_block_experts", "block_rows", block_rows, BLOCK_ROWS)
    layer = _Layer(num_experts, _E4M3)
    gate_up_scale = down_scale = np.empty(0, np.float32)
    for index in range(num_experts):
        tensors = read(index)
        layer.put(index, tensors)
        hidden, inter = tensors.down.shape
        rows, columns = -(-inter // block_rows), -(-hidden // GROUP)
        if index == 0:
            gate_up_scale = np.empty((num_experts, 2, rows, columns), np.float32)
            down_scale = np.empty((num_experts, columns, rows), np.float32)
        gate_up_scale[index, 0] = _blocks(index, "gate", tensors, (rows, columns))
        gate_up_scale[index, 1] = _blocks(index, "up", tensors, (rows, columns))
        down_scale[index] = _blocks(index, "down", tensors, (columns, rows))
    check_scales("gate weight scale", gate_up_scale[:, 0])
    check_scales("up weight scale", gate_up_scale[:, 1])
    check_scales("down weight scale", down_scale)
    return Fp8BlockExperts(
        gate_up=jnp.asarray(layer.gate_up),
        down=jnp.asarray(layer.down),
        gate_up_scale=jnp.asarray(gate_up_scale),
        down_scale=jnp.asarray(down_scale),
        block_rows=block_rows,
    )


def check_scales(name: str, scales: np.ndarray) -> None:
    """Check that all scales ``[E, ...]`` are finite and > 0.

    Raises:
      ValueError: naming the first expert with another one, ``name`` and the value.
    """
    bad = ~(np.isfinite(scales) & (scales > 0))
    if np.any(bad):
        where = tuple(int(i[0]) for i in np.nonzero(bad))
        raise ValueError(
            f"expert {where[0]}: {name} must be finite and > 0, got {scales[where]!s}"
            + (f" at block {where[1:]}" if len(where) > 1 else "")
        )


class _Layer:
    """The arrays of one layer, allocated when the first expert tells their shapes."""

    def __init__(self, num_experts: int, dtype: np.dtype | None = None) -> None:
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        self._num_experts = num_experts
        self._dtype = dtype
        self.gate_up = self.down = np.empty((0, 0, 0, 0))

    def put(self, index: int, tensors: ExpertTensors) -> None:
        if index == 0:
            hidden, inter = tensors.down.shape
            dtype = self._dtype = self._dtype or tensors.down.dtype
            self.gate_up = np.empty((self._num_experts, 2, inter, hidden), dtype)
            self.down = np.empty((self._num_experts, hidden, inter), dtype)
        slots = {
            "gate": self.gate_up[index, 0],
            "up": self.gate_up[index, 1],
            "down": self.down[index],
        }
        for name, slot in slots.items():
            tensor = getattr(tensors, name)
            if tensor.shape != slot.shape or tensor.dtype != slot.dtype:
                raise ValueError(
                    f"expert {index}: {name} must be {slot.dtype} of shape {slot.shape}, got "
                    f"{tensor.dtype} of shape {tensor.shape}"
                )
            slot[...] = tensor


def _present(index: int, name: str, kind: str, tensors: ExpertTensors) -> np.ndarray:
    field = f"{name}_scale" if kind == "weight scale" else f"{name}_input_scale"
    scale = getattr(tensors, field)
    if scale is None:
        raise ValueError(f"expert {index}: {name} {kind} is missing")
    return np.asarray(scale).astype(np.float32)


def _scalar(index: int, name: str, kind: str, tensors: ExpertTensors) -> np.ndarray:
    scale = _present(index, name, kind, tensors)
    if scale.size != 1:
        raise ValueError(
            f"expert {index}: {name} {kind} must be one number, got shape {scale.shape}"
        )
    return scale.reshape(())


def _blocks(index: int, name: str, tensors: ExpertTensors, shape: tuple[int, int]) -> np.ndarray:
    scale = _present(index, name, "weight scale", tensors)
    if scale.shape != shape:
        raise ValueError(
            f"expert {index}: {name} weight scale must have one number per block, shape {shape}, "
            f"got {scale.shape}"
        )
    return scale
