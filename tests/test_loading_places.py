"""Loading: experts quantised on the way in, arrays placed on a mesh, and what the host holds."""

import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_hpc.loading import fill, load_model
from jax_hpc.loading.fill import named_arrays
from jax_hpc.models import registry
from jax_hpc.ops.fused_moe.weights import quantize_experts_blockwise, quantize_experts_per_tensor
from tests.support import golden_checkpoints as recipes
from tests.support import tiny_checkpoint as tiny
from tests.support.golden_runs import golden, logits_of, write_tiny
from tests.support.meshes import host_mesh
from tests.support.numerics import assert_bitwise, cosine


def load(directory: Path, **options: Any) -> Any:
    return load_model(directory, progress=False, **options).model


# Quantising at load


@pytest.mark.parametrize("name", ["tiny", "tiny_hy3"])
def test_experts_made_fp8_at_load(tmp_path: Path, name: str) -> None:
    """With the bits of the operator's own helpers, and near to the model they are made of."""
    directory = write_tiny(tmp_path, name)
    dense, data = load(directory), golden(name)
    for format in ("fp8_block", "fp8_tensor"):
        model = load(directory, quantize=format)
        got, wide = model.layers[-1].mlp.experts, dense.layers[-1].mlp.experts.experts
        bound = np.sqrt(model.config.hidden_size) / 448
        norm = np.asarray(dense.layers[-1].post_attention_layernorm.weight[...]).astype(np.float32)
        want = (
            quantize_experts_blockwise(wide)
            if format == "fp8_block"
            else quantize_experts_per_tensor(
                wide, input_scale=float(got.input_scale[...]), act_scale=1.0
            )
        )
        for field in ("gate_up", "down", "down_scale"):
            assert_bitwise(getattr(got.experts, field), getattr(want, field))
        if format == "fp8_block":
            assert_bitwise(got.experts.gate_up_scale, want.gate_up_scale)
        else:
            assert_bitwise(got.experts.up_scale, want.up_scale)
            np.testing.assert_allclose(got.input_scale[...], bound * np.abs(norm).max(), rtol=1e-6)
        logits = logits_of(model, data["long.tokens"], data["long.positions"])
        assert cosine(logits, data["long.logits"]) >= 0.995, format


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without experts, got 'fp8_block'"):
        load(write_tiny(tmp_path / "dense", "tiny_qwen3"), quantize="fp8_block")
    fp8 = write_tiny(tmp_path / "fp8", "tiny_hy3_fp8")
    with pytest.raises(ValueError, match="weights are fp8_tensor already, got 'fp8_block'"):
        load(fp8, quantize="fp8_block")
    with pytest.raises(ValueError, match="'quantize' must be one of 'none', .*, got 'int4'"):
        load(fp8, quantize="int4")


def test_every_registered_model_loads_one_of_the_recipes() -> None:
    stated = {recipes.make_config(r)["architectures"][0] for r in recipes.RECIPES.values()}
    assert stated == set(registry.MODELS)


# Places


def test_arrays_go_where_their_names_say(tmp_path: Path) -> None:
    """Experts over a mesh, the rest whole on each device; the values are those of one device."""
    directory = write_tiny(tmp_path, "tiny_hy3")
    mesh = host_mesh(4)

    def places(name: str) -> NamedSharding:
        return NamedSharding(mesh, P("t") if ".mlp.experts." in name else P())

    for format in (None, "fp8_block"):
        model = load(directory, quantize=format, device=places)
        want = named_arrays(load(directory, quantize=format))
        for name, array in named_arrays(model).items():
            assert array.sharding == places(name), name
            assert_bitwise(array, want[name])
        shard = model.layers[1].mlp.experts.gate_up[...].addressable_shards[0]
        assert shard.data.shape[0] == model.config.num_experts // 4


# Memory


class Host:
    """Stands for the copy to a device that is not the host: what it was given it does not keep."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, host: np.ndarray, target: str, device: Any) -> jax.Array:
        self.nbytes += host.nbytes
        return jax.device_put(np.zeros((), host.dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_host_holds_no_more_than_a_shard_and_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The proportions of Qwen3-30B-A3B: most bytes are experts, in many layers and shards."""
    recipe = recipes.Recipe(
        seed=1, layers=8, experts=32, expert_intermediate=128, vocab=4096, shards=16
    )
    tensors = recipes.make_tensors(recipe)
    recipes.write_files(tmp_path, recipes.make_config(recipe), tensors, recipe.shards)
    width = np.dtype(jnp.dtype(dtype)).itemsize
    layer = width * sum(v.size for n, v in tensors.items() if n.startswith("model.layers.0."))
    total = width * sum(v.size for v in tensors.values())
    del tensors
    shard = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    copied = Host()
    monkeypatch.setattr(fill, "place", copied)
    tracemalloc.start()
    try:
        load(tmp_path, dtype=dtype)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert copied.nbytes >= total > 4 * (shard + layer), "else the bound proves little"
    assert peak <= shard + layer, f"{peak / 1e6:.1f} MB, allowed {(shard + layer) / 1e6:.1f} MB"


def test_ignored_patterns_may_depend_on_the_model(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored = property(lambda self: (f"model.layers.{self.config.layers}.*",))
    monkeypatch.setattr(tiny.TinyModel, "checkpoint_ignored", ignored)
    weights = tiny.tensors(rng) | {"model.layers.2.enorm.weight": np.ones(3, np.float32)}
    tiny.write(tmp_path, tiny.hf_config(), weights)
    load(tmp_path, model_class=tiny.TinyModel)
