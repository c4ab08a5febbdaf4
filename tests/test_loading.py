"""Loading: what is read is what was written, and whatever does not fit is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jax_hpc import checkpoint_plan as plans
from jax_hpc.loading import Checkpoint, CheckpointError, LoadedModel, load_model
from jax_hpc.loading.accounting import check_targets, check_tensors
from jax_hpc.loading.fill import assemble, dequantize_blocks, named_arrays
from jax_hpc.loading.load import find_model_class, resolve_dtype
from tests.support import tiny_checkpoint as tiny
from tests.support.tiny_checkpoint import same_bits

Weights = dict[str, np.ndarray]
Q0 = "model.layers.0.self_attn.q_proj.weight"
GATE = "model.layers.1.mlp.experts.0.gate_proj.weight"


def load(directory: Path, **options: Any) -> LoadedModel:
    return load_model(directory, model_class=tiny.TinyModel, progress=False, **options)


def arrays(model: nnx.Module) -> Weights:
    return {name: np.asarray(array) for name, array in named_arrays(model).items()}


# Whole models


def expected(weights: Weights, layer: int) -> tuple[np.ndarray, np.ndarray]:
    name = f"model.layers.{layer}"
    qkv = np.concatenate([weights[f"{name}.self_attn.{p}_proj.weight"] for p in "qkv"])
    experts = [
        np.stack([weights[f"{name}.mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up")])
        for e in range(tiny.EXPERTS)
    ]
    return qkv, np.stack(experts)


@pytest.mark.parametrize("write", [tiny.write, tiny.write_sharded])
def test_bf16_checkpoint_fills_every_array(
    write: Callable[..., Path], tmp_path: Path, rng: np.random.Generator
) -> None:
    weights = tiny.tensors(rng)
    loaded = load(write(tmp_path, tiny.hf_config(), weights))
    got = arrays(loaded.model)
    for layer in range(2):
        qkv, experts = expected(weights, layer)
        assert same_bits(got[f"layers.{layer}.qkv_proj.weight"], qkv)
        assert same_bits(got[f"layers.{layer}.experts.gate_up"], experts)
    assert same_bits(got["embed"], weights["model.embed_tokens.weight"])
    assert same_bits(got["norm"], weights["model.norm.weight"].astype(np.float32))
    assert loaded.config.layers == 2 and loaded.tokenizer is None


def test_float32_upcast_is_exact(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = tiny.tensors(rng)
    got = arrays(load(tiny.write(tmp_path, tiny.hf_config(), weights), dtype="float32").model)
    qkv, experts = expected(weights, 1)
    assert same_bits(got["layers.1.qkv_proj.weight"], qkv.astype(np.float32))
    assert same_bits(got["layers.1.experts.gate_up"], experts.astype(np.float32))


def block_by_block(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The definition, one element at a time."""
    out = np.zeros(weight.shape)
    for row, column in np.ndindex(weight.shape):
        out[row, column] = float(weight[row, column]) * float(scale[row // 128, column // 128])
    return out


@pytest.mark.parametrize("shape", [(1, 1), (16, 160), (130, 4), (128, 256)])
def test_dequantised_blocks_are_weight_times_scale(
    shape: tuple[int, int], rng: np.random.Generator
) -> None:
    weight = rng.integers(0, 127, shape, dtype=np.uint8).view(tiny.E4M3)
    scale = rng.uniform(0.1, 3, plans.block_scale_shape(shape)).astype(np.float32)
    got = dequantize_blocks(weight, scale)
    np.testing.assert_allclose(got, block_by_block(weight, scale), rtol=1e-7)


def test_block_fp8_linears_are_dequantised_and_experts_kept(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    weights = tiny.tensors(rng, fp8=True)
    got = arrays(load(tiny.write(tmp_path, tiny.hf_config(fp8=True), weights)).model)
    names = [f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkv"]
    parts = [block_by_block(weights[n], weights[tiny.block_scale_name(n)]) for n in names]
    # Products of fp8 and float32 have 28 bits at most, so float64's rounding to bf16 is the only
    # one.
    want = np.concatenate(parts).astype(np.float32).astype(ml_dtypes.bfloat16)
    assert same_bits(got["layers.1.qkv_proj.weight"], want)
    _, experts = expected(weights, 1)
    assert same_bits(got["layers.1.experts.gate_up"], experts)
    up = "model.layers.1.mlp.experts.1.up_proj.weight"
    assert same_bits(
        got["layers.1.experts.gate_up_scale"][1, 1], weights[tiny.block_scale_name(up)]
    )


def test_unquantised_linear_in_an_fp8_checkpoint_is_taken_as_it_is(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    weights = tiny.tensors(rng, fp8=True)
    weights[Q0] = weights[Q0].astype(ml_dtypes.bfloat16)
    del weights[tiny.block_scale_name(Q0)]
    got = arrays(load(tiny.write(tmp_path, tiny.hf_config(fp8=True), weights)).model)
    assert same_bits(got["layers.0.qkv_proj.weight"][: tiny.HIDDEN], weights[Q0])


def test_ignored_tensors_may_be_there(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = tiny.tensors(rng)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    weights["model.mtp.norm.weight"] = np.ones(4, np.float32)
    load(tiny.write(tmp_path, tiny.hf_config(), weights))


def test_arrays_go_to_the_device_asked_for(tmp_path: Path, rng: np.random.Generator) -> None:
    device = jax.devices()[-1]
    loaded = load(tiny.write(tmp_path, tiny.hf_config(), tiny.tensors(rng)), device=device)
    assert {array.device for array in named_arrays(loaded.model).values()} == {device}


def test_model_keeps_its_weights_when_the_file_changes(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    weights = tiny.tensors(rng)
    loaded = load(tiny.write(tmp_path, tiny.hf_config(), weights))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert same_bits(arrays(loaded.model)["embed"], weights["model.embed_tokens.weight"])


# What does not fit


def without(*names: str) -> Callable[[Weights], object]:
    return lambda weights: [weights.pop(name) for name in names]


def put(name: str, value: np.ndarray) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: value})


SCALE = tiny.block_scale_name(Q0)
GATE_SCALE = tiny.block_scale_name(GATE)


@pytest.mark.parametrize(
    ("fp8", "change", "message"),
    [
        (False, without(Q0), rf"tensors missing \(1\): {Q0}"),
        (False, without(Q0, GATE), rf"tensors missing \(2\): {Q0}, {GATE}"),
        (False, put("odd.weight", np.ones(2)),
         r"tensors that the model does not use \(1\): odd.weight"),
        (False, put(Q0, np.ones((3, 160), np.float32)),
         rf"tensors of the wrong shape \(1\): {Q0} is \[3, 160\], expected \[160, 160\]"),
        (False, put("model.norm.weight", np.ones(160, np.int32)),
         "model.norm.weight is I32, expected BF16, F16 or F32"),
        (False, put(Q0, np.ones((160, 160), tiny.E4M3)),
         rf"wrong dtype \(1\): {Q0} is F8_E4M3, expected a format that config.json states"),
        (True, put("model.embed_tokens.weight", np.ones((24, 160), tiny.E4M3)),
         "model.embed_tokens.weight is F8_E4M3, expected bfloat16"),
        (True, put(GATE, np.ones((144, 160), ml_dtypes.bfloat16)),
         f"{GATE} is BF16, expected float8_e4m3fn"),
        (True, without(SCALE), rf"fp8 weights without their scale \(1\): {Q0} needs {SCALE}"),
        (True, without(GATE_SCALE),
         rf"fp8 weights without their scale \(1\): {GATE} needs {GATE_SCALE}"),
        (True, put(Q0, np.ones((160, 160), ml_dtypes.bfloat16)),
         rf"scales without an fp8 weight \(1\): {SCALE} \({Q0} is BF16\)"),
        (False, put("x.weight_scale_inv", np.ones(1)),
         r"scales without an fp8 weight .*\(x.weight is missing\)"),
        (True, put(SCALE, np.ones((1, 2), np.float32)),
         rf"{SCALE} is \[1, 2\], expected \[2, 2\]"),
        (True, put(SCALE, np.ones((2, 2), np.int32)), f"{SCALE} is I32, expected F32"),
        (True, put(GATE_SCALE, np.ones((3, 2), np.float32)),
         rf"{GATE_SCALE} is \[3, 2\], expected \[2, 2\]"),
        (True, put(SCALE, np.zeros((2, 2), np.float32)),
         rf"scales that are not positive and finite \(1\): {SCALE} has 0.0 at \[0, 0\]"),
        (True, put(GATE_SCALE, np.array([[1, 1], [1, np.inf]], np.float32)),
         rf"{GATE_SCALE} has inf at \[1, 1\]"),
        (True, put(GATE_SCALE, np.array([[1, np.nan], [1, 1]], np.float32)),
         rf"{GATE_SCALE} has nan at \[0, 1\]"),
    ],
)  # fmt: skip
def test_misfit_is_named(
    fp8: bool,
    change: Callable[[Weights], object],
    message: str,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    weights = tiny.tensors(rng, fp8=fp8)
    change(weights)
    tiny.write(tmp_path, tiny.hf_config(fp8=fp8), weights)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_long_lists_are_cut_and_counted(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = tiny.tensors(rng) | {f"extra.{i:02d}": np.ones(1) for i in range(25)}
    tiny.write(tmp_path, tiny.hf_config(), weights)
    with pytest.raises(CheckpointError, match=r"use \(25\): .*extra.09 and 15 more") as caught:
        load(tmp_path)
    assert "extra.10" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"architectures": ["OtherForCausalLM"]}, ValueError,
         r"architectures \(OtherForCausalLM\) not known; known: .*Qwen3MoeForCausalLM"),
        ({}, ValueError, r"architectures \(none\) not known"),
        ({"architectures": "Qwen3ForCausalLM"}, ValueError,
         "architectures must be a list, got 'Qwen3ForCausalLM'"),
    ],
)  # fmt: skip
def test_unknown_architecture_is_named(
    config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        find_model_class(config)


@pytest.mark.parametrize(
    "stated",
    [
        {"quant_method": "gptq", "bits": 4},
        tiny.BLOCK_FP8 | {"weight_block_size": [64, 64]},
        tiny.BLOCK_FP8 | {"activation_scheme": "static"},
        tiny.BLOCK_FP8 | {"weight_block_size": 128},
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}},
    ],
)
def test_unknown_weight_format_is_named(stated: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not a known weight format; known: none") as caught:
        plans.quantization_format({"quantization_config": stated})
    assert repr(stated["quant_method"]) in str(caught.value)


def test_weight_format_that_is_no_object_is_named() -> None:
    with pytest.raises(ValueError, match="quantization_config must be an object, got 'fp8'"):
        plans.quantization_format({"quantization_config": "fp8"})


@pytest.mark.parametrize(
    ("config", "dtype", "want"),
    [
        ({}, None, "bfloat16"),
        ({"torch_dtype": "float32"}, None, "float32"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, None, "bfloat16"),
        ({"torch_dtype": "float32"}, "bfloat16", "bfloat16"),
        ({"torch_dtype": "float16"}, "float32", "float32"),
    ],
)
def test_dtype_is_the_callers_then_the_configs(
    config: dict[str, Any], dtype: str | None, want: str
) -> None:
    assert resolve_dtype(config, dtype) == want


def test_dtype_out_of_range_is_an_error() -> None:
    with pytest.raises(ValueError, match="dtype 'float16' .* or --dtype: bfloat16, float32"):
        resolve_dtype({"torch_dtype": "float16"}, None)
    with pytest.raises(
        ValueError, match="'dtype' must be one of 'bfloat16', 'float32', got 'fp8'"
    ):
        resolve_dtype({}, "fp8")
    with pytest.raises(ValueError, match="argument 'dtype' must be one of .*, got 'float64'"):
        resolve_dtype({}, "float64")


def test_missing_files_are_named_with_advice(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match="no such directory; give the directory of a Hugging"
    ):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no config.json there; is this a Hugging Face"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(NotADirectoryError, match="not a directory; give the one that holds"):
        load(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="config.json: corrupt"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object, got list"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.hf_config()))
    with pytest.raises(
        FileNotFoundError, match="neither model.safetensors nor model.safetensors.ind"
    ):
        load(tmp_path)


# Plans


SPECS = {"a": jax.ShapeDtypeStruct((2, 3), np.float32)}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([], r"arrays without a plan \(1\): a"),
        ([plans.single("a", "x", (2, 3))] * 2, r"arrays planned twice \(1\): a"),
        ([plans.single("a", "x", (2, 3)), plans.single("b", "y", (1,))],
         r"planned arrays that the model has not \(1\): b"),
        ([plans.single("a", "x", (3, 2))],
         r"arrays of another shape \(1\): a is \(2, 3\), planned \(3, 2\)"),
        ([plans.LoadItem("a", (2, 3), (plans.Source("x", (1, 3), (0,)),))],
         r"arrays that their sources do not fill \(1\): a"),
    ],
)  # fmt: skip
def test_plan_that_does_not_fit_its_model_is_an_error(
    plan: list[plans.LoadItem], message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"Tiny.checkpoint_plan: {message}"):
        check_targets("Tiny", plan, SPECS)


def test_concat_refuses_parts_that_do_not_join() -> None:
    with pytest.raises(ValueError, match="a: parts of shapes .* do not join along axis 0"):
        plans.concat("a", [("x", (2, 3)), ("y", (2, 4))])


def test_fp8_weight_whose_scale_nobody_plans_is_an_error(tmp_path: Path) -> None:
    weights = {"x": np.ones((2, 3), tiny.E4M3), "x_scale_inv": np.ones((1, 1), np.float32)}
    save_file(weights, tmp_path / "model.safetensors")
    specs = {"a": jax.ShapeDtypeStruct((2, 3), tiny.E4M3)}
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(
            CheckpointError, match="fp8 weights whose scale the model does not plan"
        ):
            check_tensors(
                checkpoint, [plans.single("a", "x", (2, 3))], specs, quantization="fp8_block"
            )


def test_parts_join_along_any_axis_and_transforms_apply(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    x, y = (rng.normal(size=(3, n)).astype(ml_dtypes.bfloat16) for n in (2, 4))
    save_file({"x": x, "y": y}, tmp_path / "model.safetensors")
    joined = plans.concat("a", [("x", x.shape), ("y", y.shape)], axis=-1)
    turned = plans.single("a", "x", x.shape, transform=np.transpose)
    with Checkpoint(tmp_path) as checkpoint:
        spec = jax.ShapeDtypeStruct((3, 6), ml_dtypes.bfloat16)
        assert same_bits(assemble(checkpoint, joined, spec), np.concatenate([x, y], 1))
        spec = jax.ShapeDtypeStruct((2, 3), np.float32)
        assert same_bits(assemble(checkpoint, turned, spec), x.T.astype(np.float32))
        with pytest.raises(
            CheckpointError, match=r"a: its transform gives float32\(2, 3\), expected"
        ):
            assemble(checkpoint, turned, jax.ShapeDtypeStruct((3, 2), np.float32))
