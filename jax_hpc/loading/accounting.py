"""Checks, before anything is read, that a checkpoint and a model's plan fit each other exactly."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import ml_dtypes
import numpy as np

from jax_hpc.checkpoint_plan import (
    ArraySpec,
    LoadItem,
    QuantFormat,
    Shape,
    Source,
    companions,
    scale_name,
    scale_shape,
    scaled_name,
)
from jax_hpc.loading.safetensors_reader import Checkpoint, CheckpointError, TensorInfo, some

ALWAYS_IGNORED = ("*.rotary_emb.inv_freq",)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOATS = frozenset(np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32))


class _Problems:
    """What does not fit, by kind: one message tells all of it."""

    def __init__(self) -> None:
        self._by_kind: dict[str, dict[str, None]] = {}

    def add(self, kind: str, name: str) -> None:
        self._by_kind.setdefault(kind, {})[name] = None

    def raise_if_any(self, where: str) -> None:
        if self._by_kind:
            parts = [
                f"{kind} ({len(names)}): {some(list(names))}"
                for kind, names in self._by_kind.items()
            ]
            raise CheckpointError(f"{where}: " + "; ".join(parts))


def check_targets(
    model_name: str, plan: Sequence[LoadItem], targets: Mapping[str, ArraySpec]
) -> None:
    """Checks that the plan fills every array of the model once and wholly.

    Raises CheckpointError naming the arrays: a fault of the model's `checkpoint_plan`.
    """
    problems = _Problems()
    planned: set[str] = set()
    for item in plan:
        for target in item.targets:
            if target in planned:
                problems.add("arrays planned twice", target)
            elif target not in targets:
                problems.add("planned arrays that the model has not", target)
            planned.add(target)
        if (
            item.target in targets
            and item.transform is None
            and item.shape != targets[item.target].shape
        ):
            shape = targets[item.target].shape
            problems.add(
                "arrays of another shape", f"{item.target} is {shape}, planned {item.shape}"
            )
        read = sum(math.prod(source.shape) for source in item.sources)
        if item.value is None and read != math.prod(item.shape):
            problems.add("arrays that their sources do not fill", item.target)
    for name in targets:
        if name not in planned:
            problems.add("arrays without a plan", name)
    problems.raise_if_any(f"{model_name}.checkpoint_plan")


def check_tensors(
    checkpoint: Checkpoint,
    plan: Sequence[LoadItem],
    targets: Mapping[str, ArraySpec],
    *,
    quantization: QuantFormat | None,
    ignored: Iterable[str] = (),
) -> None:
    """Checks that every tensor the plan wants is there as it should be, and no other.

    ignored: patterns of tensors that may be in the checkpoint without being used.
    Raises CheckpointError with the count and the first names of every kind of misfit.
    """
    problems = _Problems()
    tensors = checkpoint.tensors
    used: set[str] = set()
    wanted = {source.name for item in plan for source in item.sources}
    for item in plan:
        for source in item.sources:
            info = tensors.get(source.name)
            if info is None:
                _add_missing(problems, tensors, source.name)
                continue
            used.add(source.name)
            target = targets[item.target].dtype
            if not same_shape(info.shape, source.shape):
                problems.add("tensors of the wrong shape", _shapes(info, source.shape))
            _check_dtype(problems, info, item, target, quantization)
            if info.dtype == E4M3 and quantization is not None:
                used.update(companions(source.name, quantization))
                if scale_name(source.name, quantization) not in wanted:
                    _check_scale(problems, tensors, source, target, quantization)
    patterns = (*ALWAYS_IGNORED, *ignored)
    for name in tensors:
        if name not in used and not any(fnmatchcase(name, pattern) for pattern in patterns):
            _add_extra(problems, tensors, name)
    problems.raise_if_any(str(checkpoint.directory))


def same_shape(stored: Shape, planned: Shape) -> bool:
    """Whether they agree; a single number is stored with the shape () or [1]."""
    return stored == planned or (planned == () and stored == (1,))


def _shapes(info: TensorInfo, expected: tuple[int, ...]) -> str:
    return f"{info.name} is {list(info.shape)}, expected {list(expected)}"


def _add_missing(problems: _Problems, tensors: Mapping[str, TensorInfo], name: str) -> None:
    weight = scaled_name(name)
    if weight is None or weight not in tensors:
        problems.add("tensors missing", name)
    elif tensors[weight].dtype == E4M3:
        problems.add("fp8 weights without their scale", f"{weight} needs {name}")
    # Otherwise the weight's dtype is wrong, which is told where the weight is checked.


def _add_extra(problems: _Problems, tensors: Mapping[str, TensorInfo], name: str) -> None:
    weight = scaled_name(name)
    if weight is None:
        problems.add("tensors that the model does not use", name)
    elif weight not in tensors:
        problems.add("scales without an fp8 weight", f"{name} ({weight} is missing)")
    elif tensors[weight].dtype == E4M3:
        problems.add("scales of another format than config.json states", name)
    else:
        problems.add(
            "scales without an fp8 weight",
            f"{name} ({weight} is {tensors[weight].dtype_name})",
        )


def _check_dtype(
    problems: _Problems,
    info: TensorInfo,
    item: LoadItem,
    target: np.dtype,
    quantization: QuantFormat | None,
) -> None:
    if item.quantize is not None:
        fits, expected = info.dtype in FLOATS, "BF16, F16 or F32, to be quantised"
    elif info.dtype == E4M3 and quantization is None:
        fits, expected = False, "a format that config.json states in quantization_config"
    elif info.dtype == target:
        fits, expected = True, ""
    elif info.dtype == E4M3:
        fits, expected = (
            item.quantizable and len(info.shape) >= 2 and target in FLOATS,
            f"{target}",
        )
    else:
        fits = info.dtype in FLOATS and target in FLOATS
        expected = "BF16, F16 or F32" if target in FLOATS else f"{target}"
    if not fits:
        problems.add(
            "tensors of the wrong dtype", f"{info.name} is {info.dtype_name}, expected {expected}"
        )


def _check_scale(
    problems: _Problems,
    tensors: Mapping[str, TensorInfo],
    source: Source,
    target: np.dtype,
    quantization: QuantFormat,
) -> None:
    """Checks a scale that no item plans: that of a weight to be dequantised at load."""
    name = scale_name(source.name, quantization)
    scale, expected = tensors.get(name), scale_shape(source.shape, quantization)
    if scale is None:
        problems.add("fp8 weights without their scale", f"{source.name} needs {name}")
    elif target == E4M3:
        problems.add("fp8 weights whose scale the model does not plan", source.name)
    elif not same_shape(scale.shape, expected):
        problems.add("scales of the wrong shape", _shapes(scale, expected))
    elif scale.dtype not in FLOATS:
        problems.add(
            "scales of the wrong dtype", f"{scale.name} is {scale.dtype_name}, expected F32"
        )
