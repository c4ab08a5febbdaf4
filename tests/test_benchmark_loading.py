"""benchmarks/loading.py on a checkpoint of a few kilobytes."""

import json

from benchmarks import loading

SMALL = dict(
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    intermediate_size=64,
    vocab_size=128,
    max_position_embeddings=64,
)


def test_a_checkpoint_is_written_once_and_loaded(tmp_path, capsys):
    arguments = ["--dir", str(tmp_path), "--layers", "2"]
    loading.main(arguments, SMALL, shard_bytes=60_000)
    row = json.loads(capsys.readouterr().out)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert row["layers"] == 2 and len(files) > 2
    assert max(file.stat().st_size for file in files) < 66_000
    assert 0 <= row["peak_host_gb"] < 1 and row["seconds"] > 0
    written = [file.stat().st_mtime_ns for file in files]
    loading.main(arguments, SMALL)
    assert [file.stat().st_mtime_ns for file in files] == written
