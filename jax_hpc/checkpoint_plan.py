"""What a model wants from a checkpoint, said tensor by tensor.

A model lists `LoadItem`s in `checkpoint_plan()`; `jax_hpc.loading` carries them out. This module
imports nothing of the loader, so that models can use it without pulling that in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import numpy as np

from jax_hpc import fp8

Shape = tuple[int, ...]
QuantFormat = Literal["fp8_block", "fp8_tensor"]

_SCALE_SUFFIXES: dict[QuantFormat, str] = {"fp8_block": "_scale_inv", "fp8_tensor": "_scale"}
_KNOWN_FORMATS = (
    "quant_method 'fp8' with fmt 'e4m3', and either activation_scheme 'dynamic' with "
    f"weight_block_size [{fp8.BLOCK}, {fp8.BLOCK}] or activation_scheme 'static' without blocks"
)

_KV_SCALES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_cache.scale", "attn.{0}_scale")
"""Under self_attn: names that quantisers give to a KV cache's static scales ({0} is k or v)."""
Q_SCALES = tuple(f"*.self_attn.{form.format('q')}" for form in _KV_SCALES)
"""Patterns of the scales that stand beside them for q, which is quantised by its own values."""


class ArraySpec(Protocol):
    """Shape and dtype of an array, such as a jax.ShapeDtypeStruct or a tensor of a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


@dataclass(frozen=True)
class Source:
    """One checkpoint tensor and the region of the assembled array that it fills.

    A shape of () also stands for [1]: checkpoints store single scales either way.
    """

    name: str
    shape: Shape
    index: tuple[int | slice, ...] = ()


@dataclass(frozen=True)
class Quantize:
    """Makes fp8 values and their scales of an assembled array, once it lies on the device.

    scales: targets of the scales.
    run: array -> (values, one array for each of `scales`).
    """

    scales: tuple[str, ...]
    run: Callable[[jax.Array], tuple[jax.Array, ...]]


@dataclass(frozen=True)
class LoadItem:
    """How one parameter array is assembled from checkpoint tensors.

    target: dotted path of the array in the model, such as ``layers.3.self_attn.qkv_proj.weight``;
        a parameter that holds a dataclass of arrays continues with the field's name.
    shape: shape of the assembled array; the sources fill all of it.
    sources: the tensors, read in this order. The assembled array is allocated once and each source
        is read into its region, so stacking a layer's experts needs no second copy.
    quantizable: the sources may be fp8 with scales beside them, and are dequantised on the way in.
    transform: applied to the assembled array, which is float32 then; its result must have the
        parameter's shape and dtype. Without it the array is assembled in the parameter's dtype.
    value: the array itself, for one that no checkpoint holds, such as a table of the rotary
        embedding; there are no sources then.
    is_scale: the sources are scales, which have to be positive and finite.
    quantize: the sources are wider than fp8, the parameter is not; they are assembled as they are
        stored.
    """

    target: str
    shape: Shape
    sources: tuple[Source, ...]
    quantizable: bool = False
    transform: Callable[[np.ndarray], np.ndarray] | None = None
    value: np.ndarray | None = None
    is_scale: bool = False
    quantize: Quantize | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """Every array of the model that the item fills."""
        return (self.target, *(self.quantize.scales if self.quantize else ()))


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
    is_scale: bool = False,
) -> LoadItem:
    """One tensor as it is."""
    shape = tuple(shape)
    sources = (Source(name, shape),)
    return LoadItem(target, shape, sources, quantizable, transform, is_scale=is_scale)


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


def stack_experts(
    target: str,
    names: Sequence[Any],
    shape: Sequence[int],
    *,
    quantize: Quantize | None = None,
) -> LoadItem:
    """Weights of one shape stacked on new leading axes, one for each level of nesting of `names`.

    ``[gate_0, gate_1]`` of shape ``(I, H)`` becomes ``[2, I, H]``;
    ``[[gate_0, up_0], [gate_1, up_1]]`` becomes ``[2, 2, I, H]``.
    """
    whole, sources = _stacked(names, shape)
    return LoadItem(target, whole, sources, quantizable=True, quantize=quantize)


def stack_scales(
    target: str,
    names: Sequence[Any],
    shape: Sequence[int] = (),
    *,
    transform: Callable[[np.ndarray], np.ndarray] | None = None,
) -> LoadItem:
    """Scales stacked as :func:`stack_experts` stacks weights."""
    whole, sources = _stacked(names, shape)
    return LoadItem(target, whole, sources, transform=transform, is_scale=True)


def _stacked(names: Sequence[Any], shape: Sequence[int]) -> tuple[Shape, tuple[Source, ...]]:
    grid, shape = np.array(names, dtype=object), tuple(shape)
    sources = tuple(Source(str(grid[index]), shape, index) for index in np.ndindex(grid.shape))
    return (*grid.shape, *shape), sources


def scale_name(weight_name: str, format: QuantFormat) -> str:
    """Name of the tensor with the scales, or the one scale, of an fp8 weight."""
    return weight_name + _SCALE_SUFFIXES[format]


def input_scale_name(weight_name: str) -> str:
    """Name of the static scale of the activations that an fp8 weight of its own scale meets."""
    return weight_name.removesuffix(".weight") + ".input_scale"


def companions(weight_name: str, format: QuantFormat) -> tuple[str, ...]:
    """Tensors that belong to an fp8 weight, its scale first."""
    scale = scale_name(weight_name, format)
    return (scale, input_scale_name(weight_name)) if format == "fp8_tensor" else (scale,)


def scaled_name(name: str) -> str | None:
    """Name of the weight whose scale has this name, in any format; None for any other tensor."""
    for suffix in _SCALE_SUFFIXES.values():
        if name.endswith(f".weight{suffix}"):
            return name.removesuffix(suffix)
    return None


def scale_shape(shape: Sequence[int], format: QuantFormat) -> Shape:
    """Shape of a checkpoint's scales of a weight of this shape."""
    return block_scale_shape(shape) if format == "fp8_block" else ()


def find_kv_scales(stored: Mapping[str, ArraySpec]) -> str | None:
    """Which of the known names the checkpoint's KV scales have, or None if it has none.

    A name is under ``self_attn`` and has ``{0}`` for k or v.
    """
    for form in _KV_SCALES:
        ends = tuple("self_attn." + form.format(kind) for kind in "kv")
        if any(name.endswith(ends) for name in stored):
            return form
    return None


def block_scale_shape(shape: Sequence[int]) -> Shape:
    """Scales of a weight ``[..., N, K]`` have the shape ``[..., ceil(N/128), ceil(K/128)]``."""
    *lead, rows, columns = shape
    return (*lead, -(-rows // fp8.BLOCK), -(-columns // fp8.BLOCK))


def quantization_format(hf_config: Mapping[str, Any]) -> QuantFormat | None:
    """The weight format that config.json states: None for plain weights, "fp8_block" for 128x128
    blocks with dynamic scales of activations, "fp8_tensor" for one static scale each.

    Raises ValueError for any other format, naming it and what is known.
    """
    stated = hf_config.get("quantization_config")
    if stated and not isinstance(stated, Mapping):
        raise ValueError(f"config.json: quantization_config must be an object, got {stated!r}")
    if not stated or _only_caches(stated):
        return None
    found = {
        "quant_method": stated.get("quant_method"),
        "fmt": stated.get("fmt", "e4m3"),
        "activation_scheme": stated.get("activation_scheme", "dynamic"),
        "weight_block_size": stated.get("weight_block_size") or [],
    }
    fp8_block = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [fp8.BLOCK, fp8.BLOCK],
    }
    if found == fp8_block:
        return "fp8_block"
    if found == fp8_block | {"activation_scheme": "static", "weight_block_size": []}:
        return "fp8_tensor"
    words = ", ".join(f"{key} {found[key]!r}" for key in found)
    raise ValueError(
        f"config.json: quantization_config with {words} is not a known weight format; "
        f"known: none (bf16, f16 or f32 weights), and {_KNOWN_FORMATS}"
    )


def _only_caches(stated: Mapping[str, Any]) -> bool:
    """Plain weights with scales for a quantised KV cache, in the words of compressed-tensors."""
    is_cache = stated.get("quant_method") == "compressed-tensors" and "kv_cache_scheme" in stated
    return is_cache and not stated.get("config_groups")
