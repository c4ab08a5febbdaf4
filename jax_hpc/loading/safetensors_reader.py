"""Reads the safetensors files of a Hugging Face directory.

The format's header is parsed here and the bytes go straight into the caller's arrays: numpy has no
bfloat16 or float8 of its own, so the dtypes come from ml_dtypes, and plain reads (instead of a
memory map) keep the host's memory at one item and turn a truncated file into an error instead of a
bus fault.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
    }.items()
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100 << 20
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A checkpoint that is damaged or does not fit its model; the message names what."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `offset` counts bytes from the start of the file."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def dtype_name(self) -> str:
        """The dtype in the format's own words, such as BF16."""
        return _NAMES[self.dtype]


class Checkpoint:
    """The tensors of a directory with ``model.safetensors``, or with an index and its shards.

    Raises FileNotFoundError where files are missing and CheckpointError where one is damaged.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.tensors: dict[str, TensorInfo] = {}
        self._open: tuple[Path, IO[bytes]] | None = None
        index = self.directory / _INDEX
        if index.is_file():
            self._add_shards(_weight_map(index))
        elif (self.directory / _SINGLE).is_file():
            self._add(self.directory / _SINGLE)
        else:
            raise FileNotFoundError(_no_weights(self.directory))

    def read(self, name: str) -> np.ndarray:
        """The tensor as a new array."""
        info = self.tensors[name]
        out = np.empty(info.shape, info.dtype)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Reads the tensor into a contiguous array of its own shape and dtype."""
        info = self.tensors[name]
        if out.shape != info.shape or out.dtype != info.dtype or not out.flags.c_contiguous:
            raise ValueError(
                f"read_into: argument 'out' for {name} must be contiguous "
                f"{info.dtype}{info.shape}, got {out.dtype}{out.shape}"
            )
        file = self._file(info.file)
        file.seek(info.offset)
        rest = memoryview(out.reshape(-1).view(np.uint8))
        while rest:
            count = file.readinto(rest)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(f"{info.file}: truncated while reading tensor {name!r}")
            rest = rest[count:]

    def close(self) -> None:
        """Closes the shard that is open."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _file(self, path: Path) -> IO[bytes]:
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = (path, path.open("rb", buffering=0))
        return self._open[1]

    def _add(self, path: Path) -> None:
        for info in read_header(path):
            if info.name in self.tensors:
                other = self.tensors[info.name].file.name
                raise CheckpointError(f"{path}: tensor {info.name!r} is also in {other}")
            self.tensors[info.name] = info

    def _add_shards(self, weight_map: dict[str, str]) -> None:
        files = sorted(set(weight_map.values()))
        missing = [file for file in files if not (self.directory / file).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{self.directory}: {len(missing)} of {len(files)} shards named by {_INDEX} "
                f"missing: {some(missing)}; download them again"
            )
        for file in files:
            self._add(self.directory / file)
        for name, file in weight_map.items():
            if name not in self.tensors or self.tensors[name].file.name != Path(file).name:
                raise CheckpointError(
                    f"{self.directory / file}: tensor {name!r}, which {_INDEX} places here, "
                    "is not in it"
                )


def some(names: list[str], limit: int = 10) -> str:
    """Up to `limit` names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of one safetensors file, in file order."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(
                f"{path}: not a safetensors file, or truncated: the header's length is {length} "
                f"bytes, the file's {size}"
            )
        header = file.read(length)
    with _damaged(path):
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        infos = [_tensor_info(path, name, entry, 8 + length) for name, entry in entries.items()]
    infos.sort(key=lambda info: info.offset)
    end = 8 + length
    for info in infos:
        if info.offset != end:
            raise CheckpointError(
                f"{path}: corrupt header: tensor {info.name!r} starts at byte {info.offset}, "
                f"expected {end}"
            )
        end += info.nbytes
        if end > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {info.name!r} ends at byte {end}, the file has "
                f"{size}; download it again"
            )
    if end != size:
        raise CheckpointError(f"{path}: corrupt: {size - end} bytes after the last tensor")
    return infos


def _tensor_info(path: Path, name: str, entry: dict[str, Any], base: int) -> TensorInfo:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {entry['dtype']}, which is not known; "
            f"known: {', '.join(DTYPES)}"
        )
    dtype = DTYPES[entry["dtype"]]
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = entry["data_offsets"]
    nbytes = math.prod(shape) * dtype.itemsize
    if min(begin, end, *shape, 0) < 0 or end - begin != nbytes:
        raise CheckpointError(
            f"{path}: corrupt header: tensor {name!r} of {entry['dtype']}{list(shape)} needs "
            f"{nbytes} bytes, its offsets [{begin}, {end}] hold {end - begin}"
        )
    return TensorInfo(name, path, dtype, shape, base + begin, nbytes)


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Turns what a malformed JSON document provokes into a CheckpointError naming the file."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: corrupt: {type(error).__name__}: {error}") from error


def _weight_map(index: Path) -> dict[str, str]:
    with _damaged(index):
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}


def _no_weights(directory: Path) -> str:
    message = f"{directory}: neither {_SINGLE} nor {_INDEX} is there"
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        message += "; PyTorch pickles are not read: convert the checkpoint to safetensors"
    return message
