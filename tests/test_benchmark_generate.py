"""benchmarks/generate.py on models small enough for a CPU."""

import dataclasses
import json

import numpy as np
import pytest
from flax import nnx

from benchmarks import generate
from benchmarks.model_sizes import MODELS, rank_of
from jax_hpc.models.decoder import SparseMLP
from jax_hpc.types import Implementations

TINY = dict(
    vocab_size=64,
    hidden_size=128,
    num_layers=2,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=64,
    num_experts=8,
    experts_per_token=2,
    expert_intermediate_size=64,
    dense_intermediate_size=64,
    max_positions=64,
)


def small(name):
    config = MODELS[name].config
    shared = 64 if config.shared_intermediate_size else 0
    sparse = config.sparse_layers[:2]
    config = dataclasses.replace(
        config, **TINY, sparse_layers=sparse, shared_intermediate_size=shared
    )
    return dataclasses.replace(MODELS[name], config=config)


SMALL = {name: small(name) for name in MODELS}


def test_a_row_for_each_form(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    arguments = ["--model", "qwen3-235b-tp8", "--forms", "xla,auto", "--layers", "1"]
    arguments += ["--prompt", "16", "--new", "3"]
    generate.main([*arguments, "--out", str(out)], SMALL)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert "device" in written[0]["meta"] and written[1:] == printed
    assert [row["impl"] for row in printed] == ["xla", "auto"]
    for row in printed:
        assert (row["model"], row["format"], row["layers"]) == ("qwen3-235b-tp8", "fp8_block", 1)
        assert row["ttft_ms"] > 0 and row["tpot_ms"] > 0
        assert row["compile_s"] > 0 and row["read_gb"] > 0
        # One sequence chooses K experts in each layer.
        assert row["distinct_experts"] == row["distinct_least"] == row["distinct_uniform"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--forms", "xla,ours"], "--forms must be of xla, moe, auto, got 'ours'"),
        (["--layers", "49"], "--layers must be from 1 to 48, got 49"),
    ],
)
def test_options_that_are_not_known_are_named(arguments, words, capsys):
    with pytest.raises(SystemExit):
        generate.main(arguments)
    assert words in capsys.readouterr().err


def test_hy3_with_fp8_everywhere(capsys):
    arguments = [
        "--model",
        "hy3-tp8",
        "--batch",
        "6",
        "--prompt",
        "4",
        "--new",
        "2",
        "--kv",
        "fp8",
    ]
    generate.main([*arguments, "--forms", "auto"], SMALL)
    row = json.loads(capsys.readouterr().out)
    assert (row["model"], row["format"], row["kv"]) == ("hy3-tp8", "fp8_tensor", "fp8")
    assert 2 <= row["distinct_least"] <= row["distinct_experts"] <= 8
    assert row["distinct_uniform"] == round(8 * (1 - 0.75**6), 1)


def test_sizes_of_a_rank():
    hy3, qwen = MODELS["hy3-tp8"].config, MODELS["qwen3-235b-tp8"].config
    assert (hy3.num_q_heads, hy3.num_kv_heads, hy3.expert_intermediate_size) == (8, 1, 192)
    assert (hy3.dense_intermediate_size, hy3.shared_intermediate_size) == (1664, 192)
    assert (qwen.num_q_heads, qwen.num_kv_heads, qwen.block_rows) == (8, 1, 64)
    whole = MODELS["qwen3-30b"].config
    assert rank_of(whole, 2).block_rows == 128
    assert MODELS["qwen3-30b"].configured("dense", 4).expert_format == "dense"
    assert MODELS["hy3-tp8"].configured(None, None).linear_format == "fp8_tensor"


def test_every_layer_takes_the_form():
    chosen = SMALL["qwen3-30b"]
    model = chosen.model(chosen.config, rngs=nnx.Rngs(0))
    generate.use(model, Implementations(attention="xla", router="cuda", norm="xla"))
    assert model.norm.implementation == "xla"
    for layer in model.layers:
        assert layer.self_attn.implementation == "xla"
        assert layer.input_layernorm.implementation == "xla"
        assert layer.post_attention_layernorm.implementation == "xla"
        assert isinstance(layer.mlp, SparseMLP)
        assert layer.mlp.gate.implementation == "cuda"
        assert layer.mlp.experts.implementation == "auto"


def test_random_weights_spread_the_routing():
    """By tokens of random text, near to what uniform choices would give; also a deep layer's."""
    chosen = SMALL["qwen3-30b"]
    config = dataclasses.replace(
        chosen.config,
        num_layers=6,
        sparse_layers=(True,) * 6,
        num_experts=32,
        expert_format="fp8_block",
    )
    model = chosen.model(config, rngs=nnx.Rngs(0))
    sequences = np.random.default_rng(0).integers(0, 64, (16, 24)).tolist()
    found = generate.spread(model, sequences)
    assert found["distinct_experts"] >= 0.8 * found["distinct_uniform"], found


def test_a_model_without_experts_has_no_spread():
    chosen = SMALL["hy3-tp8"]
    config = chosen.configured("dense", 1)
    assert config.sparse_layers == (False,)
    model = chosen.model(config, rngs=nnx.Rngs(0))
    assert generate.spread(model, [[1, 2, 3]]) == {}
