"""The safetensors reader: bits come back as they were, and damage is named."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jax_hpc.loading import Checkpoint, CheckpointError
from jax_hpc.loading.safetensors_reader import DTYPES
from tests.support import tiny_checkpoint as tiny
from tests.support.tiny_checkpoint import same_bits

NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_every_dtype_reads_back_bit_for_bit(
    dtype: np.dtype, tmp_path: Path, rng: np.random.Generator
) -> None:
    array = rng.integers(0, 2, (3, 5)).astype(dtype)
    if dtype != np.bool_:
        array = rng.integers(0, 256, 15 * dtype.itemsize, dtype=np.uint8).view(dtype).reshape(3, 5)
    written = {"a": array, "scalar": np.array(array[0, 0]), "empty": array[:0]}
    save_file(written, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(written)
        for name, want in written.items():
            assert same_bits(checkpoint.read(name), want)


def test_shards_read_as_one_checkpoint(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = tiny.tensors(rng)
    tiny.write_sharded(tmp_path, tiny.hf_config(), weights)
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(weights)
        assert all(same_bits(checkpoint.read(name), want) for name, want in weights.items())


def test_read_into_refuses_an_array_that_does_not_fit(tmp_path: Path) -> None:
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(
            ValueError, match=r"'out' for a must be contiguous float32\(2, 3\), got"
        ):
            checkpoint.read_into("a", np.zeros((3, 2), np.float32))


def damage_length(data: bytes) -> bytes:
    return (1 << 40).to_bytes(8, "little") + data[8:]


def damage_json(data: bytes) -> bytes:
    return data[:8] + b"[" + data[9:]


def edit_header(edit: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def damage(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:5], "not a safetensors file, or truncated"),
        (damage_length, "or truncated: the header's length is 1099511627776 bytes"),
        (damage_json, r"model.safetensors: corrupt: JSONDecodeError"),
        (lambda data: data[:-4], r"truncated: tensor 'b' ends at byte \d+, the file has \d+"),
        (lambda data: data + b"xy", "corrupt: 2 bytes after the last tensor"),
        (edit_header(lambda h: h["a"].update(dtype="F4")),
         "tensor 'a' has dtype F4, which is not known; known: BOOL"),
        (edit_header(lambda h: h["a"].update(shape=[9])),
         r"tensor 'a' of F32\[9\] needs 36 bytes, its offsets"),
        (edit_header(lambda h: h["a"].update(shape=[-2])), r"header: tensor 'a' of F32\[-2\]"),
        (edit_header(lambda h: h["b"].update(data_offsets=[4, 16])), "tensor 'b' starts at byte"),
        (edit_header(lambda h: h["b"].pop("shape")), "corrupt: KeyError: 'shape'"),
        (edit_header(lambda h: h.update(c=3)), "corrupt: TypeError"),
    ],
)  # fmt: skip
def test_damaged_file_is_named(
    damage: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)}, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(tmp_path)
    assert str(path) in str(caught.value)


def test_file_cut_after_opening_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones(1000, np.float32)}, path)
    with Checkpoint(tmp_path) as checkpoint:
        os.truncate(path, path.stat().st_size - 1000)
        with pytest.raises(CheckpointError, match="truncated while reading tensor 'a'"):
            checkpoint.read("a")


def test_missing_shard_is_named(tmp_path: Path, rng: np.random.Generator) -> None:
    tiny.write_sharded(tmp_path, tiny.hf_config(), tiny.tensors(rng))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    message = r"1 of 3 shards named by .*index.json missing: model-00002-of-00003.safetensors"
    with pytest.raises(FileNotFoundError, match=message):
        Checkpoint(tmp_path)


def edit_index(directory: Path, edit: Callable[[dict[str, str]], object]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def test_index_that_disagrees_with_its_shards_is_an_error(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    tiny.write_sharded(tmp_path, tiny.hf_config(), tiny.tensors(rng))
    edit_index(tmp_path, lambda weight_map: weight_map.update({NORM: weight_map[EMBED]}))
    with pytest.raises(
        CheckpointError, match=f"tensor '{NORM}', which .* places here, is not in it"
    ):
        Checkpoint(tmp_path)


def test_tensor_in_two_shards_is_an_error(tmp_path: Path, rng: np.random.Generator) -> None:
    tiny.write_sharded(tmp_path, tiny.hf_config(), tiny.tensors(rng))
    save_file({"a": np.ones(1)}, tmp_path / "x.safetensors")
    save_file({"a": np.ones(1)}, tmp_path / "y.safetensors")
    edit_index(tmp_path, lambda m: m.update(a="x.safetensors", b="y.safetensors"))
    with pytest.raises(
        CheckpointError, match="y.safetensors: tensor 'a' is also in x.safetensors"
    ):
        Checkpoint(tmp_path)


def test_corrupt_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="index.json: corrupt: KeyError: 'weight_map'"):
        Checkpoint(tmp_path)


def test_pickles_are_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="convert the checkpoint to safetensors"):
        Checkpoint(tmp_path)
