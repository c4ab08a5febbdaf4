"""benchmarks/generate.py on a model small enough for a CPU."""

import dataclasses
import json

from benchmarks import generate
from jax_hpc.types import Implementations

SMALL = dataclasses.replace(
    generate.QWEN3_30B,
    vocab_size=64,
    hidden_size=128,
    num_layers=2,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=64,
    num_experts=4,
    experts_per_token=2,
    expert_intermediate_size=128,
    sparse_layers=(True,) * 2,
    max_positions=64,
)


def test_a_row_for_each_form(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    arguments = ["--forms", "xla,auto", "--layers", "1", "--prompt", "16", "--new", "3"]
    generate.main([*arguments, "--out", str(out)], SMALL)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert "device" in written[0]["meta"] and written[1:] == printed
    assert [row["impl"] for row in printed] == ["xla", "auto"]
    for row in printed:
        assert row["layers"] == 1 and row["ttft_ms"] > 0 and row["tpot_ms"] > 0
        assert row["compile_s"] > 0


def test_every_layer_takes_the_form():
    model = generate.Qwen3MoE(SMALL, rngs=generate.nnx.Rngs(0))
    generate.use(model, Implementations(attention="xla", router="cuda"))
    for layer in model.layers:
        assert layer.self_attn.implementation == "xla"
        assert isinstance(layer.mlp, generate.SparseMLP)
        assert layer.mlp.gate.implementation == "cuda"
        assert layer.mlp.experts.implementation == "auto"
