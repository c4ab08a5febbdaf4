"""Hy3: its configuration, what it keeps in float32, and the scales of its fp8 checkpoints."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_hpc.checkpoint_plan import find_kv_scales, quantization_format
from jax_hpc.loading import CheckpointError, load_model
from jax_hpc.loading.accounting import check_targets
from jax_hpc.loading.fill import named_arrays
from jax_hpc.models import Hy3, Hy3Config
from tests.support import golden_checkpoints as recipes
from tests.support.golden_runs import golden, logits_of
from tests.support.numerics import assert_bitwise, cosine

FP8 = jnp.float8_e4m3fn
RECIPE = recipes.RECIPES["tiny_hy3"]
FP8_RECIPE = recipes.RECIPES["tiny_hy3_fp8"]
HUB = {
    "architectures": ["HYV3ForCausalLM"],
    "vocab_size": 120832,
    "hidden_size": 4096,
    "num_hidden_layers": 80,
    "first_k_dense_replace": 1,
    "intermediate_size": 13312,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "qk_norm": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
    "max_position_embeddings": 262144,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "expert_hidden_dim": 1536,
    "moe_router_use_sigmoid": True,
    "moe_router_enable_expert_bias": True,
    "route_norm": True,
    "router_scaling_factor": 2.826,
    "enable_moe_fp32_combine": False,
    "enable_lm_head_fp32": True,
    "enable_attention_fp32_softmax": False,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}
"""Of tencent/Hy3."""
HY_MT2 = HUB | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "intermediate_size": 6912,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "expert_hidden_dim": 768,
    "num_nextn_predict_layers": 0,
}
"""Of tencent/Hy-MT2-30B-A3B, whose files hold no layer that drafts tokens."""
HY_MT2_PARAMETERS = 30_064_725_888
"""As the hub counts them in the published files."""
STATIC = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "ignored_layers": ["lm_head", "model.embed_tokens"],
    "kv_cache_scheme": "static",
}


def write(directory: Path, recipe: recipes.Recipe, tensors: recipes.Tensors) -> Path:
    return recipes.write_files(directory, recipes.make_config(recipe), tensors, recipe.shards)


def load(directory: Path, **options: Any) -> Any:
    return load_model(directory, progress=False, **options).model


def test_config_of_the_published_checkpoint() -> None:
    config = Hy3Config.from_hf(HUB)
    assert config.sparse_layers == (False,) + (True,) * 79
    assert (config.rms_eps, config.rope_theta) == (1e-5, 11158840.0)
    assert (config.scoring, config.router_scale, config.renormalize) == ("sigmoid", 2.826, True)
    assert (config.num_experts, config.experts_per_token, config.use_router_bias) == (192, 8, True)
    assert (config.expert_intermediate_size, config.shared_intermediate_size) == (1536, 1536)
    assert (config.expert_format, config.linear_format) == ("dense", "dense")
    static = Hy3Config.from_hf(HUB | {"quantization_config": STATIC})
    assert (static.expert_format, static.linear_format) == ("fp8_tensor", "fp8_tensor")
    listed = HUB | {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "dense"]}
    assert Hy3Config.from_hf(listed).sparse_layers == (False, True, False)


def test_hy_mt2_takes_the_published_tensors() -> None:
    """Each once, by name and shape, into the whole of a model of 48 layers, without weights."""
    config = Hy3Config.from_hf(HY_MT2)
    assert config.sparse_layers == (False,) + (True,) * 47
    model = nnx.eval_shape(lambda: Hy3(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    plan = model.checkpoint_plan({})
    arrays = named_arrays(model)
    check_targets("Hy3", plan, arrays)
    sources = [source for item in plan for source in item.sources]
    found = {source.name: source.shape for source in sources}
    assert len(found) == len(sources)
    assert found == recipes.weight_shapes(
        recipes.Recipe(
            seed=0,
            family="hy_v3",
            dense_layers=(0,),
            hidden=2048,
            layers=48,
            q_heads=32,
            kv_heads=4,
            head_dim=128,
            experts=128,
            expert_intermediate=768,
            dense_intermediate=6912,
            vocab=120832,
        )
    )
    assert sum(map(math.prod, found.values())) == HY_MT2_PARAMETERS
    shapes = {
        "layers.0.mlp.gate_up_proj.weight": (2 * 6912, 2048),
        "layers.47.self_attn.qkv_proj.weight": ((32 + 2 * 4) * 128, 2048),
        "layers.47.mlp.gate.parts": (1, 128, 2048),
        "layers.47.mlp.gate.bias": (128,),
        "layers.47.mlp.experts.gate_up": (128, 2, 768, 2048),
        "layers.47.mlp.experts.down": (128, 2048, 768),
        "layers.47.mlp.shared_mlp.down_proj.weight": (2048, 768),
        "lm_head.weight": (120832, 2048),
    }
    assert {name: arrays[name].shape for name in shapes} == shapes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"moe_router_use_sigmoid": False}, "'moe_router_use_sigmoid' must be True, got False"),
        ({"qk_norm": False}, "'qk_norm' must be True, got False"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default', got 'yarn'"),
    ],
)
def test_config_refusals(change: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=f"Hy3: .*{words}"):
        Hy3Config.from_hf(HUB | change)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (["dense"], "Hy3Config: argument 'sparse_layers' must be 80 values, got 1"),
        (["dense", "wide"], "'mlp_layer_types' must be one of 'dense', 'sparse', got 'wide'"),
    ],
)
def test_kinds_of_layers_that_do_not_fit(kinds: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Hy3Config.from_hf(HUB | {"mlp_layer_types": kinds})


def test_router_and_head_keep_a_float32_checkpoint(tmp_path: Path) -> None:
    """In a bf16 model; published checkpoints store both in bf16, which one part holds exactly."""
    tensors = recipes.make_tensors(RECIPE)
    model = load(write(tmp_path / "bf16", RECIPE, tensors))
    assert model.layers[1].mlp.gate.parts.shape[0] == 1
    assert model.lm_head.weight.dtype == jnp.bfloat16
    noise = np.random.default_rng(0)
    names = [n for n in tensors if n.endswith("router.gate.weight") or n == "lm_head.weight"]
    for name in names:
        wide = tensors[name].astype(np.float32)
        tensors[name] = wide * (1 + 2e-3 * noise.random(wide.shape, np.float32))
    model = load(write(tmp_path / "f32", RECIPE, tensors))
    parts = np.asarray(model.layers[1].mlp.gate.parts[...]).astype(np.float64)
    held = sum(part / 256.0**i for i, part in enumerate(parts))
    want = tensors[names[0]].astype(np.float64)
    assert np.abs(held - want).max() <= 2.0**-24 * np.abs(want).max()
    assert_bitwise(model.lm_head.weight[...], tensors["lm_head.weight"])
    assert model.logits(jnp.ones((2, RECIPE.hidden), jnp.bfloat16)).dtype == jnp.float32


def test_every_scale_of_a_static_fp8_checkpoint_is_used(tmp_path: Path) -> None:
    """q, k and v, gate and up have scales of their own; one quantised x serves all of them."""
    tensors = recipes.make_tensors(FP8_RECIPE)
    model = load(write(tmp_path, FP8_RECIPE, tensors))
    attention, mlp = model.layers[1].self_attn, model.layers[1].mlp
    prefix = "model.layers.1.self_attn"
    rows = np.cumsum([0, 512, 128, 128])
    for index, part in enumerate("qkv"):
        scale = np.asarray(attention.qkv_proj.weight_scale[rows[index] : rows[index + 1]])
        assert (scale == tensors[f"{prefix}.{part}_proj.weight_scale"].astype(np.float32)).all()
    inputs = [tensors[f"{prefix}.{part}_proj.input_scale"].item() for part in "qkv"]
    assert len(set(inputs)) == 3 and attention.qkv_proj.input_scale[...] == max(inputs)
    for kind in "kv":
        want = tensors[f"{prefix}.{kind}_scale"].item()
        assert want != 1 and getattr(attention, f"{kind}_scale")[...] == np.float32(want)
    experts = [f"model.layers.1.mlp.experts.{e}" for e in range(FP8_RECIPE.experts)]
    for half in ("gate", "up", "down"):
        want = [tensors[f"{e}.{half}_proj.weight_scale"].astype(np.float32) for e in experts]
        assert_bitwise(getattr(mlp.experts, f"{half}_scale")[...], np.stack(want))
    want = [tensors[f"{e}.down_proj.input_scale"] for e in experts]
    assert_bitwise(mlp.experts.act_scale[...], np.concatenate(want))
    inputs = [tensors[f"{e}.{h}_proj.input_scale"].item() for e in experts for h in ("gate", "up")]
    assert mlp.experts.input_scale[...] == np.float32(max(inputs))
    assert mlp.shared_mlp.gate_up_proj.weight.dtype == FP8
    assert model.layers[0].mlp.down_proj.weight.dtype == FP8
    assert model.lm_head.weight.dtype == jnp.bfloat16


def test_fp8_cache_with_the_checkpoints_scales(tmp_path: Path) -> None:
    """Near to the float32 cache; with the scales of K and V exchanged for 1/64, far from it."""
    tensors = recipes.make_tensors(FP8_RECIPE)
    model = load(write(tmp_path, FP8_RECIPE, tensors), quantize="none", dtype="float32")
    data = golden("tiny_hy3_fp8")
    prompt = data["long.tokens"], data["long.positions"]
    assert cosine(logits_of(model, *prompt, dtype=FP8), data["long.logits"]) >= 0.995
    for layer in model.layers:
        layer.self_attn.k_scale[...] = layer.self_attn.k_scale[...] / 64
    assert cosine(logits_of(model, *prompt, dtype=FP8), data["long.logits"]) < 0.99


@pytest.mark.parametrize(
    "form", ["{0}_proj.{0}_scale", "{0}_cache.scale", "attn.{0}_scale", "{0}_scale"]
)
def test_kv_scales_are_found_by_every_known_name(form: str) -> None:
    spec = jax.ShapeDtypeStruct((), jnp.float32)
    names = [f"model.layers.{i}.self_attn.{form.format(kind)}" for i in (0, 1) for kind in "kv"]
    assert find_kv_scales(dict.fromkeys(names, spec)) == form
    assert find_kv_scales({"model.layers.0.self_attn.k_norm.weight": spec}) is None


def change(name: str, value: Any) -> Any:
    def apply(tensors: recipes.Tensors) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    return apply


EXPERT = "model.layers.2.mlp.experts.3.up_proj"
Q = "model.layers.0.self_attn.q_proj"
K_SCALE = "model.layers.1.self_attn.k_scale"


@pytest.mark.parametrize(
    ("apply", "words"),
    [
        (change(f"{EXPERT}.input_scale", None), f"tensors missing.*{EXPERT}.input_scale"),
        (change(f"{Q}.weight_scale", None), f"without their scale.*needs {Q}.weight_scale"),
        (change(K_SCALE, None), rf"tensors missing \(1\): {K_SCALE}"),
        (change(K_SCALE, np.zeros(1, np.float32)), f"not positive and finite.*{K_SCALE} has 0.0"),
        (
            change(f"{EXPERT}.weight_scale", np.array(np.inf, np.float32)),
            f"{EXPERT}.weight_scale has inf",
        ),
        (
            change(f"{Q}.weight_scale", np.ones(512, np.float32)),
            rf"{Q}.weight_scale is \[512\], expected \[\]",
        ),
        (
            change(f"{Q}.weight_scale_inv", np.ones((4, 2), np.float32)),
            "scales of another format than config.json states",
        ),
        (change("model.layers.9.mlp.expert_bias", np.ones(16)), "model does not use.*layers.9"),
    ],
)
def test_misfit_is_named(tmp_path: Path, apply: Any, words: str) -> None:
    tensors = recipes.make_tensors(FP8_RECIPE)
    apply(tensors)
    with pytest.raises(CheckpointError, match=words):
        load(write(tmp_path, FP8_RECIPE, tensors))


@pytest.mark.parametrize("form", ["{0}_scale", "attn.{0}_scale"])
def test_scales_for_caches_alone_leave_the_weights_plain(tmp_path: Path, form: str) -> None:
    """A bf16 checkpoint with calibrated scales of its KV cache, and of q, which are not used."""
    stated = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {}}
    assert quantization_format({"quantization_config": stated}) is None
    recipe = dataclasses.replace(RECIPE, shards=1)
    tensors = recipes.make_tensors(recipe)
    for index in range(recipe.layers):
        for kind in "qkv":
            scale = np.full(1, 0.5 + index, np.float32)
            tensors[f"model.layers.{index}.self_attn.{form.format(kind)}"] = scale
    config = recipes.make_config(recipe) | {"quantization_config": stated}
    model = load(recipes.write_files(tmp_path, config, tensors, 1))
    assert [float(layer.self_attn.v_scale[...]) for layer in model.layers] == [0.5, 1.5, 2.5]
