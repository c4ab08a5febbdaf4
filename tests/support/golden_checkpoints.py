"""The tiny random Qwen3-MoE checkpoints behind tests/golden, written from a recipe.

numpy, ml_dtypes and safetensors only: scripts/make_goldens.py uses this beside torch, where the
package is not installed. Every tensor is seeded by its own name, from uniform random numbers, so
the files do not depend on the order of the tensors or on a library's normal distribution; the
goldens hold a hash of the tensors all the same.
"""

import hashlib
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

BFLOAT16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = 128
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Recipe:
    """Shape and format of one checkpoint; `layout` is the generation of config.json's keys."""

    seed: int
    hidden: int = 256
    layers: int = 2
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 8
    top_k: int = 2
    expert_intermediate: int = 192
    dense_intermediate: int = 320
    vocab: int = 512
    rope_theta: float = 1e6
    renormalize: bool = True
    tied: bool = False
    dense_layers: tuple[int, ...] = field(default=())
    fp8: bool = False
    shards: int = 3
    layout: str = "hub"  # "hub": as published; "transformers5": as transformers 5 saves it


RECIPES = {
    "tiny": Recipe(seed=1, layout="transformers5"),
    "tiny_dense_tied": Recipe(
        seed=2, renormalize=False, tied=True, dense_layers=(0,), shards=1, rope_theta=1e4
    ),
    "tiny_fp8": Recipe(seed=3, fp8=True, shards=2),
}


def _uniform(recipe: Recipe, name: str, shape: tuple[int, ...], std: float) -> np.ndarray:
    rng = np.random.default_rng([recipe.seed, zlib.crc32(name.encode())])
    return (std * 3**0.5) * (2.0 * rng.random(shape) - 1.0)


def _shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight, as Hugging Face's Qwen3MoeForCausalLM stores them."""
    r = recipe
    q, kv = r.q_heads * r.head_dim, r.kv_heads * r.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (r.vocab, r.hidden)}
    for index in range(r.layers):
        layer = f"model.layers.{index}."
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (q, r.hidden),
            f"{layer}self_attn.k_proj.weight": (kv, r.hidden),
            f"{layer}self_attn.v_proj.weight": (kv, r.hidden),
            f"{layer}self_attn.o_proj.weight": (r.hidden, q),
            f"{layer}self_attn.q_norm.weight": (r.head_dim,),
            f"{layer}self_attn.k_norm.weight": (r.head_dim,),
            f"{layer}input_layernorm.weight": (r.hidden,),
            f"{layer}post_attention_layernorm.weight": (r.hidden,),
        }
        mlps = {f"{layer}mlp.": r.dense_intermediate}
        if index not in r.dense_layers:
            shapes[f"{layer}mlp.gate.weight"] = (r.experts, r.hidden)
            experts = range(r.experts)
            mlps = {f"{layer}mlp.experts.{e}.": r.expert_intermediate for e in experts}
        for prefix, width in mlps.items():
            shapes[f"{prefix}gate_proj.weight"] = (width, r.hidden)
            shapes[f"{prefix}up_proj.weight"] = (width, r.hidden)
            shapes[f"{prefix}down_proj.weight"] = (r.hidden, width)
    shapes["model.norm.weight"] = (r.hidden,)
    if not r.tied:
        shapes["lm_head.weight"] = (r.vocab, r.hidden)
    return shapes


def _values(recipe: Recipe, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Gains that keep hidden states near one, spread the router and give peaked logits."""
    if len(shape) == 1:
        return 1.0 + _uniform(recipe, name, shape, 0.1)
    fan_in = shape[-1] ** -0.5
    if name.endswith("embed_tokens.weight"):
        return _uniform(recipe, name, shape, 3.0 * fan_in if recipe.tied else 1.0)
    # A tied head favours the token just read, unless the layers add more than the embedding.
    branch = 16.0 if recipe.tied else 1.0
    gains = {"mlp.gate.weight": 2.0, "lm_head.weight": 3.0}
    gains |= {"o_proj.weight": branch, "down_proj.weight": branch}
    gain = next((value for end, value in gains.items() if name.endswith(end)), 1.0)
    return _uniform(recipe, name, shape, gain * fan_in)


def block_quantize(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float [N, K] -> (e4m3 [N, K], bfloat16 scales [ceil(N/128), ceil(K/128)] that multiply).

    scale = amax / 448 rounded to bfloat16, 1 where a block is all zero; values saturate.
    """
    n, k = weight.shape
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    padded = np.zeros((rows * BLOCK, columns * BLOCK), np.float32)
    padded[:n, :k] = weight
    amax = np.abs(padded.reshape(rows, BLOCK, columns, BLOCK)).max(axis=(1, 3))
    scales = np.where(amax > 0, amax / E4M3_MAX, 1.0).astype(BFLOAT16)
    quotient = weight.astype(np.float32) / spread(scales, (n, k))
    return np.clip(quotient, -E4M3_MAX, E4M3_MAX).astype(E4M3), scales


def spread(scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Block scales as float32 of the weight's own shape."""
    whole = scales.astype(np.float32).repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)
    return whole[: shape[0], : shape[1]]


def _is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def make_tensors(recipe: Recipe) -> Tensors:
    """What the checkpoint's files hold: bfloat16, or block-fp8 with scales beside it."""
    tensors: Tensors = {}
    for name, shape in _shapes(recipe).items():
        values = _values(recipe, name, shape)
        if recipe.fp8 and _is_quantized(name):
            tensors[name], tensors[f"{name}_scale_inv"] = block_quantize(values)
        else:
            tensors[name] = values.astype(BFLOAT16)
    return tensors


def dequantize(tensors: Tensors) -> Tensors:
    """The same checkpoint in float32 without scales."""
    dense: Tensors = {}
    for name, value in tensors.items():
        if not name.endswith("_scale_inv"):
            dense[name] = value.astype(np.float32)
            if value.dtype == E4M3:
                dense[name] *= spread(tensors[f"{name}_scale_inv"], value.shape)
    return dense


def make_config(recipe: Recipe) -> dict[str, Any]:
    """config.json."""
    r = recipe
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "head_dim": r.head_dim,
        "hidden_act": "silu",
        "hidden_size": r.hidden,
        "initializer_range": 0.02,
        "intermediate_size": r.dense_intermediate,
        "max_position_embeddings": 1024,
        "mlp_only_layers": list(r.dense_layers),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": r.expert_intermediate,
        "norm_topk_prob": r.renormalize,
        "num_attention_heads": r.q_heads,
        "num_experts_per_tok": r.top_k,
        "num_hidden_layers": r.layers,
        "num_key_value_heads": r.kv_heads,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": r.tied,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": r.vocab,
    }
    if r.layout == "hub":
        config |= {"num_experts": r.experts, "torch_dtype": "bfloat16"}
        config |= {"rope_theta": r.rope_theta, "rope_scaling": None}
    else:
        config |= {"num_local_experts": r.experts, "dtype": "bfloat16"}
        config["rope_parameters"] = {"rope_theta": r.rope_theta, "rope_type": "default"}
    if r.fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": _unquantized_modules(r),
        }
    return config


def _unquantized_modules(recipe: Recipe) -> list[str]:
    names = [n for n in _shapes(recipe) if not _is_quantized(n) and "embed" not in n]
    return sorted(name.removesuffix(".weight") for name in names)


def tensor_hash(tensors: Tensors) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def write_files(directory: Path, config: dict[str, Any], tensors: Tensors, shards: int) -> Path:
    """Writes config.json and one model.safetensors, or an index and its shards."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        file = file if shards > 1 else "model.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({n: tensors[n] for n in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        total = sum(value.nbytes for value in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return directory


def write_checkpoint(directory: Path, name: str) -> Path:
    """Writes the checkpoint called `name` in RECIPES and returns its directory."""
    recipe = RECIPES[name]
    return write_files(directory, make_config(recipe), make_tensors(recipe), recipe.shards)
