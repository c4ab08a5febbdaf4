"""Reads the arrays of a plan from a checkpoint and puts them into an abstract model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from jax_hpc import fp8
from jax_hpc.checkpoint_plan import ArraySpec, LoadItem, QuantFormat, scale_name
from jax_hpc.loading.accounting import E4M3
from jax_hpc.loading.safetensors_reader import Checkpoint, CheckpointError, some
from jax_hpc.progress import Progress

# Looking the 256 values up is several times faster than ml_dtypes' conversion, element by element.
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

type Device = jax.Device | jax.sharding.Sharding  # pyright: ignore[reportInvalidTypeForm]
type Placement = Device | Callable[[str], Device]
"""Where arrays go: all to one place, or each to what the function of its dotted path says."""


def named_arrays(model: nnx.Module) -> dict[str, Any]:
    """Every array of the model by dotted path, which may end in the field of a dataclass."""
    arrays = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        for inner, leaf in jax.tree_util.tree_leaves_with_path(variable.get_value()):
            arrays[_dotted(path, inner)] = leaf
    return arrays


def fill(
    model: nnx.Module,
    checkpoint: Checkpoint,
    plan: Sequence[LoadItem],
    targets: Mapping[str, ArraySpec],
    *,
    quantization: QuantFormat | None,
    device: Placement | None = None,
    progress: Progress,
) -> None:
    """Reads every item of a checked plan and puts it into the model.

    The host holds two items at most, the one that is read and the one on its way to the device.

    Raises CheckpointError where a scale is not positive and finite, or an array of the model stays
    abstract.
    """
    arrays: dict[str, jax.Array] = {}
    placed = None
    for item in plan:
        host = assemble(checkpoint, item, targets[item.target], quantization)
        if placed is not None:
            # The copy to the device ran while this item was read; waiting here bounds the host's
            # memory.
            placed.block_until_ready()
        placed = place(host, item.target, device)
        arrays |= _finish(item, placed, targets, device)
        progress.advance(bytes_of(checkpoint, item))
    _put(model, arrays)
    abstract = [
        n for n, leaf in named_arrays(model).items() if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if abstract:
        raise CheckpointError(
            f"{type(model).__name__}: arrays left without values: {some(abstract)}"
        )


def place(host: np.ndarray, target: str, device: Placement | None) -> jax.Array:
    """Starts the copy of an array to where it belongs."""
    return jax.device_put(host, device(target) if callable(device) else device)


def bytes_of(checkpoint: Checkpoint, item: LoadItem) -> int:
    """Size of an item's tensors in the checkpoint."""
    return sum(checkpoint.tensors[source.name].nbytes for source in item.sources)


def _finish(
    item: LoadItem,
    placed: jax.Array,
    targets: Mapping[str, ArraySpec],
    device: Placement | None,
) -> dict[str, jax.Array]:
    """The model's arrays made of a placed one."""
    if item.quantize is None:
        return {item.target: placed}
    made = dict(zip(item.targets, item.quantize.run(placed), strict=True))
    for name, array in made.items():
        _check_made(name, array, targets[name])
        if callable(device):
            made[name] = jax.device_put(array, device(name))
    return made


def assemble(
    checkpoint: Checkpoint,
    item: LoadItem,
    spec: ArraySpec,
    quantization: QuantFormat | None = None,
) -> np.ndarray:
    """One array of the model, or what is still to be quantised into one, on the host."""
    if item.value is not None:
        return item.value.astype(spec.dtype)
    dtype = spec.dtype if item.transform is None else np.float32
    if item.quantize is not None:
        dtype = checkpoint.tensors[item.sources[0].name].dtype
    out = np.empty(item.shape, dtype)
    for source in item.sources:
        _read_source(checkpoint, source.name, out[(*source.index, ...)], quantization)
    if item.is_scale:
        names = [source.name for source in item.sources]
        _check_scale(checkpoint, names, [out[(*s.index, ...)] for s in item.sources])
    if item.transform is None:
        return out
    result = np.asarray(item.transform(out))
    _check_made(item.target, result, spec)
    return result


def _check_made(target: str, made: ArraySpec, spec: ArraySpec) -> None:
    if made.shape != spec.shape or made.dtype != spec.dtype:
        raise CheckpointError(
            f"{target}: its transform gives {made.dtype}{made.shape}, "
            f"expected {spec.dtype}{spec.shape}"
        )


def dequantize_blocks(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float32 ``[..., N, K]`` of an e4m3 weight and the scales of its 128x128 blocks."""
    rows, columns = weight.shape[-2:]
    wide = np.repeat(scale.astype(np.float32), fp8.BLOCK, axis=-1)[..., :columns]
    values = _E4M3_VALUES[weight.view(np.uint8)]
    for block in range(scale.shape[-2]):
        span = slice(block * fp8.BLOCK, min((block + 1) * fp8.BLOCK, rows))
        values[..., span, :] *= wide[..., block : block + 1, :]
    return values


def dequantize_tensor(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float32 of an e4m3 weight and its one scale."""
    return _E4M3_VALUES[weight.view(np.uint8)] * scale.astype(np.float32).reshape(())


def _read_source(
    checkpoint: Checkpoint, name: str, out: np.ndarray, quantization: QuantFormat | None
) -> None:
    info = checkpoint.tensors[name]
    if info.dtype == out.dtype and info.shape == out.shape and out.flags.c_contiguous:
        checkpoint.read_into(name, out)
    elif info.dtype == E4M3 and out.dtype != E4M3 and quantization is not None:
        scale = checkpoint.read(scale_name(name, quantization))
        _check_scale(checkpoint, [scale_name(name, quantization)], [scale])
        dequantize = dequantize_blocks if quantization == "fp8_block" else dequantize_tensor
        out[...] = dequantize(checkpoint.read(name), scale)
    else:
        out[...] = checkpoint.read(name).reshape(out.shape)


def _check_scale(
    checkpoint: Checkpoint, names: Sequence[str], values: Sequence[np.ndarray]
) -> None:
    bad = []
    for name, value in zip(names, values, strict=True):
        wrong = ~(np.isfinite(value) & (value > 0))
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            bad.append(f"{name} has {float(value[at])} at {list(at)}")
    if bad:
        raise CheckpointError(
            f"{checkpoint.directory}: scales that are not positive and finite ({len(bad)}): "
            f"{some(bad)}"
        )


def _put(model: nnx.Module, arrays: Mapping[str, jax.Array]) -> None:
    state = nnx.state(model)
    for path, variable in nnx.to_flat_state(state):
        leaves, tree = jax.tree_util.tree_flatten_with_path(variable.get_value())
        filled = [arrays.get(_dotted(path, inner), leaf) for inner, leaf in leaves]
        variable.set_value(jax.tree_util.tree_unflatten(tree, filled))
    nnx.update(model, state)


def _dotted(path: tuple[Any, ...], inner: tuple[Any, ...]) -> str:
    keys = [str(key) for key in path]
    for key in inner:
        keys.append(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))))
    return ".".join(keys)
