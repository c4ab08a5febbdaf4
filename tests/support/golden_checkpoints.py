"""The tiny random checkpoints behind tests/golden, written from a recipe.

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
from typing import Any, Literal

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
    family: Literal["qwen3_moe", "qwen3", "hy_v3"] = "qwen3_moe"
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
    fp8: Literal["", "block", "tensor"] = ""
    uneven_blocks: bool = False  # else blocks of a matrix have nearly one scale
    shards: int = 3
    layout: str = "hub"  # "hub": as published; "transformers5": as transformers 5 saves it


HY3: dict[str, Any] = dict(
    family="hy_v3", dense_layers=(0,), experts=16, top_k=4, expert_intermediate=64
)
RECIPES = {
    "tiny": Recipe(seed=1, layout="transformers5"),
    "tiny_dense_tied": Recipe(
        seed=2, renormalize=False, tied=True, dense_layers=(0,), shards=1, rope_theta=1e4
    ),
    "tiny_fp8": Recipe(seed=3, fp8="block", shards=2),
    "tiny_qwen3": Recipe(seed=4, family="qwen3", tied=True, shards=1),
    "tiny_qwen3_fp8": Recipe(seed=8, family="qwen3", fp8="block", uneven_blocks=True, shards=2),
    "tiny_hy3": Recipe(seed=5, layers=3, **HY3),
    "tiny_hy3_fp8": Recipe(seed=6, layers=3, fp8="tensor", **HY3),
}
ROUTER_SCALE = 2.826
"""Of Hy3's routers."""


def _uniform(recipe: Recipe, name: str, shape: tuple[int, ...], std: float) -> np.ndarray:
    rng = np.random.default_rng([recipe.seed, zlib.crc32(name.encode())])
    return (std * 3**0.5) * (2.0 * rng.random(shape) - 1.0)


def _shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Every weight of the checkpoint."""
    drafts = _draft_shapes(recipe) if recipe.family == "hy_v3" else {}
    return weight_shapes(recipe) | drafts


def weight_shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Name and shape of the model's weights, as the family's published checkpoints store them."""
    r = recipe
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (r.vocab, r.hidden)}
    for index in range(r.layers):
        shapes |= _layer_shapes(r, index)
    shapes["model.norm.weight"] = (r.hidden,)
    if not r.tied:
        shapes["lm_head.weight"] = (r.vocab, r.hidden)
    return shapes


def _layer_shapes(r: Recipe, index: int) -> dict[str, tuple[int, ...]]:
    layer = f"model.layers.{index}."
    q, kv = r.q_heads * r.head_dim, r.kv_heads * r.head_dim
    shapes: dict[str, tuple[int, ...]] = {
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
    if r.family != "qwen3" and index not in r.dense_layers:
        hy3 = r.family == "hy_v3"
        shapes[f"{layer}mlp.{'router.' if hy3 else ''}gate.weight"] = (r.experts, r.hidden)
        experts = range(r.experts)
        mlps = {f"{layer}mlp.experts.{e}.": r.expert_intermediate for e in experts}
        if hy3:
            shapes[f"{layer}mlp.expert_bias"] = (r.experts,)
            mlps[f"{layer}mlp.shared_mlp."] = r.expert_intermediate
    for prefix, width in mlps.items():
        shapes[f"{prefix}gate_proj.weight"] = (width, r.hidden)
        shapes[f"{prefix}up_proj.weight"] = (width, r.hidden)
        shapes[f"{prefix}down_proj.weight"] = (r.hidden, width)
    return shapes


def _draft_shapes(r: Recipe) -> dict[str, tuple[int, ...]]:
    """Some tensors of the layer that drafts tokens, which is not part of the model."""
    draft = f"model.layers.{r.layers}."
    norms = ("enorm", "hnorm", "final_layernorm", "input_layernorm")
    shapes: dict[str, tuple[int, ...]] = {f"{draft}{name}.weight": (r.hidden,) for name in norms}
    return shapes | {
        f"{draft}eh_proj.weight": (r.hidden, 2 * r.hidden),
        f"{draft}self_attn.q_proj.weight": (r.q_heads * r.head_dim, r.hidden),
        f"{draft}mlp.expert_bias": (r.experts,),
    }


def _values(recipe: Recipe, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Gains that keep hidden states near one, spread the router and give peaked logits."""
    if name.endswith("expert_bias"):
        return _uniform(recipe, name, shape, 0.2)
    if len(shape) == 1:
        return 1.0 + _uniform(recipe, name, shape, 0.1)
    fan_in = shape[-1] ** -0.5
    if name.endswith("embed_tokens.weight"):
        return _uniform(recipe, name, shape, 3.0 * fan_in if recipe.tied else 1.0)
    # A tied head favours the token just read, unless the layers add more than the embedding.
    branch = 16.0 if recipe.tied else 1.0
    gains = {"gate.weight": 2.0, "lm_head.weight": 3.0}
    gains |= {"o_proj.weight": branch, "down_proj.weight": branch}
    if recipe.family == "hy_v3":
        # Its weights of experts sum to 2.8: a layer adds a fraction of what it reads, or a choice
        # between two experts of nearly equal score, which fp8 may turn, would turn the whole text.
        gains["down_proj.weight"] = 0.25
    gain = next((value for end, value in gains.items() if name.endswith(end)), 1.0)
    values = _uniform(recipe, name, shape, gain * fan_in)
    if recipe.uneven_blocks and _is_quantized(name):
        blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        # From half to twice as large.
        values *= spread(np.exp2(_uniform(recipe, f"{name}.blocks", blocks, 3**-0.5)), shape)
    return values


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


def tensor_quantize(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float [N, K] -> (e4m3 [N, K], bfloat16 [] that multiplies): amax / 448, saturating."""
    scale = np.asarray(np.abs(weight).max() / E4M3_MAX).astype(BFLOAT16)
    quotient = weight.astype(np.float32) / scale.astype(np.float32)
    return np.clip(quotient, -E4M3_MAX, E4M3_MAX).astype(E4M3), scale


def _is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def make_tensors(recipe: Recipe) -> Tensors:
    """What the checkpoint's files hold: bfloat16, or fp8 with scales beside it."""
    tensors: Tensors = {}
    for name, shape in _shapes(recipe).items():
        values = _values(recipe, name, shape)
        if recipe.fp8 == "block" and _is_quantized(name):
            tensors[name], tensors[f"{name}_scale_inv"] = block_quantize(values)
        elif recipe.fp8 == "tensor" and _is_quantized(name):
            tensors[name], tensors[f"{name}_scale"] = tensor_quantize(values)
        elif name.endswith("expert_bias"):
            tensors[name] = values.astype(np.float32)
        else:
            tensors[name] = values.astype(BFLOAT16)
    return tensors | (_static_scales(recipe) if recipe.fp8 == "tensor" else {})


def _static_scales(recipe: Recipe) -> Tensors:
    """Of activations and of the KV cache, each another; they stand in the last shard."""
    scales: Tensors = {}
    for name in filter(_is_quantized, _shapes(recipe)):
        key = name.removesuffix("weight") + "input_scale"
        # Large enough for nearly all activations.
        value = (1.0 + _uniform(recipe, key, (1,), 0.2)) * 10.0 / E4M3_MAX
        scales[key] = value.astype(np.float32)
    for index in range(recipe.layers):
        for kind in "kv":
            key = f"model.layers.{index}.self_attn.{kind}_scale"
            value = (1.0 + _uniform(recipe, key, (1,), 0.2)) * 6.0 / E4M3_MAX
            scales[key] = value.astype(np.float32)
    return scales


def dequantize(tensors: Tensors) -> Tensors:
    """The same checkpoint in float32 without scales."""
    dense: Tensors = {}
    for name, value in tensors.items():
        if name.endswith(("_scale_inv", "_scale")):
            continue
        dense[name] = value.astype(np.float32)
        if f"{name}_scale_inv" in tensors:
            dense[name] *= spread(tensors[f"{name}_scale_inv"], value.shape)
        elif f"{name}_scale" in tensors:
            dense[name] *= tensors[f"{name}_scale"].astype(np.float32)
    return dense


def make_config(recipe: Recipe) -> dict[str, Any]:
    """config.json."""
    r = recipe
    config: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": r.head_dim,
        "hidden_act": "silu",
        "hidden_size": r.hidden,
        "initializer_range": 0.02,
        "intermediate_size": r.dense_intermediate,
        "max_position_embeddings": 1024,
        "model_type": r.family,
        "num_attention_heads": r.q_heads,
        "num_hidden_layers": r.layers,
        "num_key_value_heads": r.kv_heads,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": r.tied,
        "use_cache": True,
        "vocab_size": r.vocab,
    }
    config |= {"hy_v3": _hy3_config, "qwen3": _qwen3_config, "qwen3_moe": _qwen3_moe_config}[
        r.family
    ](r)
    if r.layout == "hub":
        config["torch_dtype"] = "bfloat16"
    else:
        config["dtype"] = "bfloat16"
    if r.layout == "hub" and r.family != "hy_v3":
        config |= {"rope_theta": r.rope_theta, "rope_scaling": None}
    else:
        config["rope_parameters"] = {"rope_theta": r.rope_theta, "rope_type": "default"}
    if r.fp8 == "block":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": _unquantized_modules(r),
        }
    elif r.fp8 == "tensor":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ["lm_head", "model.embed_tokens"],
            "kv_cache_scheme": "static",
        }
    return config


def _qwen3_config(r: Recipe) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "max_window_layers": r.layers,
        "sliding_window": None,
        "use_sliding_window": False,
    }


def _qwen3_moe_config(r: Recipe) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(r.dense_layers),
        "moe_intermediate_size": r.expert_intermediate,
        "norm_topk_prob": r.renormalize,
        "num_experts" if r.layout == "hub" else "num_local_experts": r.experts,
        "num_experts_per_tok": r.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
    }


def _hy3_config(r: Recipe) -> dict[str, Any]:
    return {
        "architectures": ["HYV3ForCausalLM"],
        "enable_attention_fp32_softmax": False,
        "enable_lm_head_fp32": True,
        "enable_moe_fp32_combine": False,
        "expert_hidden_dim": r.expert_intermediate,
        "first_k_dense_replace": len(r.dense_layers),
        "moe_intermediate_size": r.expert_intermediate,
        "moe_router_enable_expert_bias": True,
        "moe_router_use_sigmoid": True,
        "num_experts": r.experts,
        "num_experts_per_tok": r.top_k,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": 1,
        "qk_norm": True,
        "rms_norm_eps": 1e-5,
        "route_norm": True,
        "router_scaling_factor": ROUTER_SCALE,
    }


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
