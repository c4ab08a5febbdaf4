"""benchmarks/loading.py on a checkpoint of a few kilobytes."""

import dataclasses
import json

import pytest

from benchmarks import loading
from benchmarks.model_sizes import MODELS, QWEN3_30B
from benchmarks.results import HERE, read_results
from jax_hpc.models import Qwen3MoEConfig

SMALL = dataclasses.replace(
    MODELS["qwen3-30b"],
    config=dataclasses.replace(
        QWEN3_30B,
        hidden_size=64,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=32,
        num_experts=4,
        experts_per_token=2,
        expert_intermediate_size=32,
        dense_intermediate_size=64,
        vocab_size=128,
        max_positions=64,
    ),
)


def test_a_checkpoint_is_written_once_and_loaded(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    arguments = ["--dir", str(tmp_path), "--layers", "2", "--out", str(out)]
    loading.main(arguments, SMALL, shard_bytes=60_000)
    row = json.loads(capsys.readouterr().out)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert row["layers"] == 2 and len(files) > 2
    assert max(file.stat().st_size for file in files) < 66_000
    assert 0 <= row["peak_host_gb"] < 1 and row["seconds"] > 0
    meta, rows = read_results(out)
    assert rows == [row]
    assert meta is not None and {"device", "jax", "date"} <= set(meta)
    assert meta["host"] == loading.host()
    written = [file.stat().st_mtime_ns for file in files]
    loading.main(arguments, SMALL)
    assert [file.stat().st_mtime_ns for file in files] == written
    assert len(read_results(out)[1]) == 1


def test_config_json_states_the_sizes():
    assert Qwen3MoEConfig.from_hf(loading.config_of(QWEN3_30B)) == QWEN3_30B


def test_more_layers_than_the_model_has_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        loading.main(["--dir", str(tmp_path), "--layers", "49"])
    assert "--layers must be from 1 to 48, got 49" in capsys.readouterr().err


def test_the_recorded_rows_say_where_they_were_measured():
    meta, rows = read_results(HERE / "results" / "loading.jsonl")
    assert meta is not None and {"device", "host", "jax", "date"} <= set(meta)
    assert rows and all(row["peak_host_gb"] <= 8 for row in rows)
