"""A tiny model and checkpoints for it, to test loading without any real model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.tree_util import register_dataclass
from safetensors.numpy import save_file

from jax_hpc.checkpoint_plan import (
    LoadItem,
    block_scale_shape,
    concat,
    quantization_format,
    scale_name,
    single,
    stack_experts,
    stack_scales,
)

HIDDEN, INTER, EXPERTS, VOCAB, KV = 160, 144, 2, 24, 16
E4M3 = ml_dtypes.float8_e4m3fn
BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def block_scale_name(weight: str) -> str:
    return scale_name(weight, "fp8_block")


@register_dataclass
@dataclass(frozen=True)
class Experts:
    """A parameter that holds more than one array."""

    gate_up: jax.Array
    gate_up_scale: jax.Array | None = None


class Linear(nnx.Module):
    def __init__(self, rows: int, columns: int, dtype: Any):
        self.weight = nnx.Param(jnp.zeros((rows, columns), dtype))


class Layer(nnx.Module):
    def __init__(self, fp8: bool, dtype: Any):
        self.qkv_proj = Linear(HIDDEN + 2 * KV, HIDDEN, dtype)
        shape = (EXPERTS, 2, INTER, HIDDEN)
        scale = jnp.zeros(block_scale_shape(shape), jnp.float32) if fp8 else None
        self.experts = nnx.Param(Experts(jnp.zeros(shape, E4M3 if fp8 else dtype), scale))


class TinyModel(nnx.Module):
    """Two layers with a fused projection and stacked experts, an embedding and a norm."""

    checkpoint_ignored = ("model.mtp.*",)

    @dataclass(frozen=True)
    class Config:
        layers: int
        fp8: bool

        @classmethod
        def from_hf(cls, config: dict[str, Any], stored: Any = None) -> Self:
            return cls(config["num_hidden_layers"], quantization_format(config) == "fp8_block")

    def __init__(
        self,
        config: Config,
        rngs: nnx.Rngs | None = None,
        dtype: Any = jnp.bfloat16,
        implementations: Any = None,
    ):
        self.config, self.dtype = config, dtype
        self.embed = nnx.Param(jnp.zeros((VOCAB, HIDDEN), dtype))
        self.layers = nnx.List([Layer(config.fp8, dtype) for _ in range(config.layers)])
        self.norm = nnx.Param(jnp.zeros((HIDDEN,), jnp.float32))

    def checkpoint_plan(self, stored: Any, *, quantize: bool = False) -> list[LoadItem]:
        items = [single("embed", "model.embed_tokens.weight", (VOCAB, HIDDEN))]
        for i in range(self.config.layers):
            name = f"model.layers.{i}"
            rows = {"q": HIDDEN, "k": KV, "v": KV}
            parts = [(f"{name}.self_attn.{p}_proj.weight", (n, HIDDEN)) for p, n in rows.items()]
            items.append(concat(f"layers.{i}.qkv_proj.weight", parts, quantizable=True))
            items += self._expert_items(f"layers.{i}.experts", f"{name}.mlp.experts")
        return [*items, single("norm", "model.norm.weight", (HIDDEN,))]

    def _expert_items(self, target: str, name: str) -> list[LoadItem]:
        names = [
            [f"{name}.{e}.gate_proj.weight", f"{name}.{e}.up_proj.weight"] for e in range(EXPERTS)
        ]
        items = [stack_experts(f"{target}.gate_up", names, (INTER, HIDDEN))]
        if self.config.fp8:
            scales = [[block_scale_name(n) for n in pair] for pair in names]
            shape = block_scale_shape((INTER, HIDDEN))
            items.append(stack_scales(f"{target}.gate_up_scale", scales, shape))
        return items


def hf_config(*, fp8: bool = False, **values: Any) -> dict[str, Any]:
    config = {"architectures": ["TinyForCausalLM"], "num_hidden_layers": 2, "dtype": "bfloat16"}
    return config | ({"quantization_config": BLOCK_FP8} if fp8 else {}) | values


def tensors(rng: np.random.Generator, *, fp8: bool = False) -> dict[str, np.ndarray]:
    """What a checkpoint of the model holds: bf16, or block-fp8 where fp8 checkpoints have it."""
    made = {
        "model.embed_tokens.weight": _bf16(rng, VOCAB, HIDDEN),
        "model.norm.weight": _bf16(rng, HIDDEN),
    }
    for i in range(2):
        name = f"model.layers.{i}"
        shapes = {f"{name}.self_attn.q_proj.weight": (HIDDEN, HIDDEN)}
        shapes |= {f"{name}.self_attn.{p}_proj.weight": (KV, HIDDEN) for p in "kv"}
        for e in range(EXPERTS):
            prefix = f"{name}.mlp.experts.{e}"
            shapes |= {f"{prefix}.{p}_proj.weight": (INTER, HIDDEN) for p in ("gate", "up")}
        for weight, shape in shapes.items():
            if fp8:
                made[weight] = rng.normal(size=shape).astype(E4M3)
                scale = rng.uniform(0.5, 2.0, block_scale_shape(shape))
                made[block_scale_name(weight)] = scale.astype(np.float32)
            else:
                made[weight] = _bf16(rng, *shape)
    return made


def _bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(ml_dtypes.bfloat16)


def write(directory: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    """Writes config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    return directory


def write_sharded(
    directory: Path, config: dict[str, Any], weights: dict[str, np.ndarray], shards: int = 3
) -> Path:
    """Writes config.json, the index and its shards."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names, weight_map = list(weights), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: weights[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether two arrays agree in shape, dtype and every bit, NaNs included."""
    same_kind = got.dtype == want.dtype and got.shape == want.shape
    return same_kind and got.tobytes() == np.ascontiguousarray(want).tobytes()
