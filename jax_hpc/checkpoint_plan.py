"""What a model wants from a checkpoint, said tensor by tensor.

A model lists `LoadItem`s in `checkpoint_plan()`; `jax_hpc.loading` carries them out. This module
imports nothing of the loader, so that models can use it without pulling that in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jax_hpc import fp8

Shape = tuple[int, ...]
QuantFormat = Literal["fp8_block"]

_SCALE_SUFFIX = "_scale_inv"
_KNOWN_FORMATS = (
    "quant_method 'fp8' with fmt 'e4m3', activation_scheme 'dynamic' and "
    f"weight_block_size [{fp8.BLOCK}, {fp8.BLOCK}]"
)


@dataclass(frozen=True)
class Source:
    """One checkpoint tensor and the region of the assembled array that it fills."""

    name: str
    shape: Shape
    index: tuple[int | slice, ...] = ()


@dataclass(frozen=True)
class LoadItem:
    """How one parameter array is assembled from checkpoint tensors.

    target: dotted path of the array in the model, such as ``layers.3.self_attn.qkv_proj.weight``;
        a parameter that holds a dataclass of arrays continues with the field's name.
    shape: shape of the assembled array; the sources fill all of it.
    sources: the tensors, read in this order. The assembled array is allocated once and each source
        is read into its region, so stacking a layer's experts needs no second copy.
    quantizable: the sources may be block-fp8 with scales beside them, and are dequantised on the
        way in.
    transform: applied to the assembled array, which is float32 then; its result must have the
        parameter's shape and dtype. Without it the array is assembled in the parameter's dtype.
    value: the array itself, for one that no checkpoint holds, such as a table of the rotary
        embedding; there are no sources then.
    """

    target: str
    shape: Shape
    sources: tuple[Source, ...]
    quantizable: bool = False
    transform: Callable[[np.ndarray], np.ndarray] | None = None
    value: np.ndarray | None = None


def constant(target: str, value: np.ndarray) -> LoadItem:
    """An array that the model's configuration determines."""
    return LoadItem(target, value.shape, (), value=value)


def single(
    target: str,
    name: str,
    shape: Sequence[int],
    *,
    quantizable: bool = False,
    transform: Callable[[np.ndarray], np.ndarray] | None = None,
) -> LoadItem:
    """One tensor as it is."""
    shape = tuple(shape)
    return LoadItem(target, shape, (Source(name, shape),), quantizable, transform)


def concat(
    target: str,
    parts: Sequence[tuple[str, Sequence[int]]],
    *,
    axis: int = 0,
    quantizable: bool = False,
) -> LoadItem:
    """The (name, shape) parts joined along an axis, such as q, k and v."""
    shapes = [tuple(shape) for _, shape in parts]
    axis %= len(shapes[0])
    if len({shape[:axis] + shape[axis + 1 :] for shape in shapes}) > 1:
        raise ValueError(f"{target}: parts of shapes {shapes} do not join along axis {axis}")
    sources, start = [], 0
    for (name, _), shape in zip(parts, shapes, strict=True):
        stop = start + shape[axis]
        sources.append(Source(name, shape, (*([slice(None)] * axis), slice(start, stop))))
        start = stop
    whole = (*shapes[0][:axis], start, *shapes[0][axis + 1 :])
    return LoadItem(target, whole, tuple(sources), quantizable)


def stack_experts(target: str, names: Sequence[Any], shape: Sequence[int]) -> LoadItem:
    """Tensors of one shape stacked on new leading axes, one for each level of nesting of `names`.

    ``[gate_0, gate_1]`` of shape ``(I, H)`` becomes ``[2, I, H]``;
    ``[[gate_0, up_0], [gate_1, up_1]]`` becomes ``[2, 2, I, H]``.
    """
    grid = np.array(names, dtype=object)
    shape = tuple(shape)
    sources = tuple(Source(str(grid[index]), shape, index) for index in np.ndindex(grid.shape))
    return LoadItem(target, (*grid.shape, *shape), sources, quantizable=True)


def scale_name(weight_name: str) -> str:
    """Name of the tensor with the block scales of an fp8 weight."""
    return weight_name + _SCALE_SUFFIX


def scaled_name(name: str) -> str | None:
    """Name of the weight that a block-scale tensor belongs to, or None for any other tensor."""
    return name.removesuffix(_SCALE_SUFFIX) if name.endswith(_SCALE_SUFFIX) else None


def block_scale_shape(shape: Sequence[int]) -> Shape:
    """Scales of a weight ``[..., N, K]`` have the shape ``[..., ceil(N/128), ceil(K/128)]``."""
    *lead, rows, columns = shape
    return (*lead, -(-rows // fp8.BLOCK), -(-columns // fp8.BLOCK))


def quantization_format(hf_config: Mapping[str, Any]) -> QuantFormat | None:
    """The weight format that config.json states: None for plain weights, "fp8_block" for 128x128
    blocks.

    Raises ValueError for any other format, naming it and what is known.
    """
    stated = hf_config.get("quantization_config")
    if not stated:
        return None
    found = {
        "quant_method": stated.get("quant_method"),
        "fmt": stated.get("fmt", "e4m3"),
        "activation_scheme": stated.get("activation_scheme", "dynamic"),
        "weight_block_size": list(stated.get("weight_block_size") or []),
    }
    block_fp8 = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [fp8.BLOCK, fp8.BLOCK],
    }
    if found == block_fp8:
        return "fp8_block"
    words = ", ".join(f"{key} {found[key]!r}" for key in found)
    raise ValueError(
        f"config.json: quantization_config with {words} is not a known weight format; "
        f"known: none (bf16, f16 or f32 weights), and {_KNOWN_FORMATS}"
    )
