"""Reads the arrays of a plan from a checkpoint and puts them into an abstract model."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from jax_hpc import fp8
from jax_hpc.checkpoint_plan import LoadItem, scale_name, scaled_name
from jax_hpc.loading.accounting import E4M3, ArraySpec
from jax_hpc.loading.safetensors_reader import Checkpoint, CheckpointError, some
from jax_hpc.progress import Progress

# Looking the 256 values up is several times faster than ml_dtypes' conversion, element by element.
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

type Device = jax.Device | jax.sharding.Sharding  # pyright: ignore[reportInvalidTypeForm]


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
    device: Device | None = None,
    progress: Progress,
) -> None:
    """Reads every item of a checked plan and puts it into the model, one item in host memory at a
    time.

    Raises CheckpointError where a scale is not positive and finite, or an array of the model stays
    abstract.
    """
    arrays: dict[str, jax.Array] = {}
    placed = None
    for item in plan:
        spec = targets[item.target]
        host = assemble(checkpoint, item, spec)
        if placed is not None:
            # The copy to the device ran while this item was read; waiting here bounds the host's
            # memory.
            placed.block_until_ready()
        placed = arrays[item.target] = jax.device_put(host, device)
        progress.advance(sum(checkpoint.tensors[source.name].nbytes for source in item.sources))
    _put(model, arrays)
    abstract = [
        n for n, leaf in named_arrays(model).items() if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if abstract:
        raise CheckpointError(
            f"{type(model).__name__}: arrays left without values: {some(abstract)}"
        )


def assemble(checkpoint: Checkpoint, item: LoadItem, spec: ArraySpec) -> np.ndarray:
    """One array of the model, on the host."""
    if item.value is not None:
        return item.value.astype(spec.dtype)
    out = np.empty(item.shape, spec.dtype if item.transform is None else np.float32)
    for source in item.sources:
        _read_source(checkpoint, source.name, out[(*source.index, ...)])
    _check_scales(checkpoint, item, out)
    if item.transform is None:
        return out
    result = item.transform(out)
    if result.shape != spec.shape or result.dtype != spec.dtype:
        raise CheckpointError(
            f"{item.target}: its transform gives {result.dtype}{result.shape}, "
            f"expected {spec.dtype}{spec.shape}"
        )
    return result


def dequantize_blocks(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float32 ``[..., N, K]`` of an e4m3 weight and the scales of its 128x128 blocks."""
    rows, columns = weight.shape[-2:]
    wide = np.repeat(scale.astype(np.float32), fp8.BLOCK, axis=-1)[..., :columns]
    values = _E4M3_VALUES[weight.view(np.uint8)]
    for block in range(scale.shape[-2]):
        span = slice(block * fp8.BLOCK, min((block + 1) * fp8.BLOCK, rows))
        values[..., span, :] *= wide[..., block : block + 1, :]
    return values


def _read_source(checkpoint: Checkpoint, name: str, out: np.ndarray) -> None:
    dtype = checkpoint.tensors[name].dtype
    if dtype == out.dtype and out.flags.c_contiguous:
        checkpoint.read_into(name, out)
    elif dtype == E4M3 and out.dtype != E4M3:
        scale = checkpoint.read(scale_name(name))
        _check_scale(checkpoint, [scale_name(name)], [scale])
        out[...] = dequantize_blocks(checkpoint.read(name), scale)
    else:
        out[...] = checkpoint.read(name)


def _check_scales(checkpoint: Checkpoint, item: LoadItem, out: np.ndarray) -> None:
    scales = [source for source in item.sources if scaled_name(source.name) is not None]
    _check_scale(checkpoint, [s.name for s in scales], [out[(*s.index, ...)] for s in scales])


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
