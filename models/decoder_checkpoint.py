"""Names of the decoders' tensors in Hugging Face checkpoints, and the parameters they fill."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np

from jax_hpc import fp8
from jax_hpc.checkpoint_plan import (
    ArraySpec,
    LoadItem,
    Quantize,
    block_scale_shape,
    concat,
    constant,
    find_kv_scales,
    input_scale_name,
    scale_name,
    single,
    stack_experts,
    stack_scales,
)
from jax_hpc.nn.linear import LinearFormat
from jax_hpc.ops.fused_moe.weights import quantize_blocks, quantize_matrices
from jax_hpc.ops.router_gemm import split_router_weight
from jax_hpc.rope import rope_table

if TYPE_CHECKING:
    from jax_hpc.models.decoder import DecoderConfig

_ONE = np.ones((), np.float32)


@dataclass(frozen=True)
class Names:
    """Tensors of a layer that families call differently, and what stands after the layers.

    router, router_bias, shared_mlp: of a sparse layer. draft_layers: layers after the last one.
    """

    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.expert_bias"
    shared_mlp: str = "mlp.shared_mlp"
    draft_layers: int = 0


def plan(
    config: "DecoderConfig",
    names: Names,
    router_terms: int,
    stored: Mapping[str, ArraySpec],
    quantize: bool,
) -> list[LoadItem]:
    """Every parameter of the model, in the order in which checkpoints store layers."""
    hidden, vocab = config.hidden_size, config.vocab_size
    kv_scales = find_kv_scales(stored)
    items = [single("embed_tokens.weight", "model.embed_tokens.weight", (vocab, hidden))]
    for index, sparse in enumerate(config.sparse_layers):
        layer, source = f"layers.{index}", f"model.layers.{index}"
        items += _attention(config, layer, source, kv_scales)
        if sparse:
            items += _router(config, names, layer, source, router_terms)
            items += _experts(config, layer, source, quantize)
            if config.shared_intermediate_size:
                items += _mlp(
                    f"{layer}.mlp.shared_mlp",
                    f"{source}.{names.shared_mlp}",
                    hidden,
                    config.shared_intermediate_size,
                    config.linear_format,
                )
        else:
            width = config.dense_intermediate_size
            mlp = (f"{layer}.mlp", f"{source}.mlp")
            items += _mlp(*mlp, hidden, width, config.linear_format)
    items.append(single("norm.weight", "model.norm.weight", (hidden,)))
    if not config.tie_embeddings:
        items.append(single("lm_head.weight", "lm_head.weight", (vocab, hidden)))
    table = rope_table(config.max_positions, config.head_dim, config.rope_theta)
    items.append(constant("cos_sin", table))
    return items


def _attention(
    config: "DecoderConfig", layer: str, source: str, kv_scales: str | None
) -> list[LoadItem]:
    attention, tensor = f"{layer}.self_attn", f"{source}.self_attn"
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
    norms = ("input_layernorm", "post_attention_layernorm")
    rows = {"q": q, "k": kv, "v": kv}
    qkv = [(f"{tensor}.{part}_proj.weight", (rows[part], hidden)) for part in rows]
    output = [(f"{tensor}.o_proj.weight", (hidden, q))]
    return [
        *(single(f"{layer}.{n}.weight", f"{source}.{n}.weight", (hidden,)) for n in norms),
        *_linear(f"{attention}.qkv_proj", qkv, config.linear_format),
        *_linear(f"{attention}.o_proj", output, config.linear_format),
        single(f"{attention}.q_norm", f"{tensor}.q_norm.weight", (head_dim,)),
        single(f"{attention}.k_norm", f"{tensor}.k_norm.weight", (head_dim,)),
        *(
            constant(f"{attention}.{kind}_scale", _ONE)
            if kv_scales is None
            else single(
                f"{attention}.{kind}_scale",
                f"{tensor}.{kv_scales.format(kind)}",
                (),
                is_scale=True,
            )
            for kind in "kv"
        ),
    ]


def _mlp(
    target: str, source: str, hidden: int, width: int, format: LinearFormat
) -> list[LoadItem]:
    gate_up = [(f"{source}.{name}_proj.weight", (width, hidden)) for name in ("gate", "up")]
    down = [(f"{source}.down_proj.weight", (hidden, width))]
    return [
        *_linear(f"{target}.gate_up_proj", gate_up, format),
        *_linear(f"{target}.down_proj", down, format),
    ]


def _linear(
    target: str, parts: Sequence[tuple[str, tuple[int, int]]], format: LinearFormat
) -> list[LoadItem]:
    """A product's weight, of one matrix or several stacked; fp8 with a scale for each."""
    items = [concat(f"{target}.weight", parts, quantizable=True)]
    if format == "fp8_tensor":
        names, rows = [name for name, _ in parts], [shape[0] for _, shape in parts]
        scales = [scale_name(name, format) for name in names]
        items += [
            stack_scales(
                f"{target}.weight_scale",
                scales,
                transform=functools.partial(np.repeat, repeats=rows),
            ),
            # One quantised x serves all of them.
            stack_scales(
                f"{target}.input_scale", list(map(input_scale_name, names)), transform=np.max
            ),
        ]
    return items


def _router(
    config: "DecoderConfig", names: Names, layer: str, source: str, terms: int
) -> list[LoadItem]:
    shape = (config.num_experts, config.hidden_size)
    split = functools.partial(_split, terms=terms)
    items = [single(f"{layer}.mlp.gate.parts", f"{source}.{names.router}", shape, transform=split)]
    if config.use_router_bias:
        bias = f"{source}.{names.router_bias}"
        items.append(single(f"{layer}.mlp.gate.bias", bias, (config.num_experts,)))
    return items


def _experts(config: "DecoderConfig", layer: str, source: str, quantize: bool) -> list[LoadItem]:
    target, tensor = f"{layer}.mlp.experts", f"{source}.mlp.experts"
    hidden, width = config.hidden_size, config.expert_intermediate_size
    every = range(config.num_experts)
    gate_up = [[f"{tensor}.{e}.{name}_proj.weight" for name in ("gate", "up")] for e in every]
    down = [f"{tensor}.{e}.down_proj.weight" for e in every]
    format = config.expert_format
    if quantize and format == "fp8_block":
        blocks = [
            Quantize((f"{target}.{name}_scale",), _quantize_blocks) for name in ("gate_up", "down")
        ]
        return [
            stack_experts(f"{target}.gate_up", gate_up, (width, hidden), quantize=blocks[0]),
            stack_experts(f"{target}.down", down, (hidden, width), quantize=blocks[1]),
        ]
    if quantize and format == "fp8_tensor":
        return _quantized_per_tensor(config, target, source, gate_up, down)
    items = [
        stack_experts(f"{target}.gate_up", gate_up, (width, hidden)),
        stack_experts(f"{target}.down", down, (hidden, width)),
    ]
    if format == "fp8_block":
        scales = [[scale_name(name, format) for name in pair] for pair in gate_up]
        items += [
            stack_scales(f"{target}.gate_up_scale", scales, block_scale_shape((width, hidden))),
            stack_scales(
                f"{target}.down_scale",
                [scale_name(name, format) for name in down],
                block_scale_shape((hidden, width)),
            ),
        ]
    elif format == "fp8_tensor":
        gates, ups = ([scale_name(pair[half], format) for pair in gate_up] for half in (0, 1))
        inputs = [[input_scale_name(name) for name in pair] for pair in gate_up]
        items += [
            stack_scales(f"{target}.gate_scale", gates),
            stack_scales(f"{target}.up_scale", ups),
            stack_scales(f"{target}.down_scale", [scale_name(name, format) for name in down]),
            # x is quantised once, for all experts.
            stack_scales(f"{target}.input_scale", inputs, transform=np.max),
            stack_scales(f"{target}.act_scale", list(map(input_scale_name, down))),
        ]
    return items


def _quantized_per_tensor(
    config: "DecoderConfig", target: str, source: str, gate_up: list[list[str]], down: list[str]
) -> list[LoadItem]:
    """Experts quantised at load, with static scales of activations that no calibration gave.

    The norm before the experts bounds their input, so that nothing of it saturates: after it no
    element exceeds sqrt(H) times its weight. The intermediate has no useful bound; it is stored
    as it is, up to 448.
    """
    hidden, width = config.hidden_size, config.expert_intermediate_size
    halves = Quantize((f"{target}.gate_scale", f"{target}.up_scale"), _quantize_halves)
    whole = Quantize((f"{target}.down_scale",), quantize_matrices)
    norm = f"{source}.post_attention_layernorm.weight"
    return [
        stack_experts(f"{target}.gate_up", gate_up, (width, hidden), quantize=halves),
        stack_experts(f"{target}.down", down, (hidden, width), quantize=whole),
        single(f"{target}.input_scale", norm, (hidden,), transform=_largest_input),
        constant(f"{target}.act_scale", np.ones(config.num_experts, np.float32)),
    ]


def _largest_input(norm: np.ndarray) -> np.ndarray:
    bound = np.sqrt(np.float32(norm.size)) * np.abs(norm).max() / np.float32(fp8.E4M3_MAX)
    return np.asarray(bound or 1.0, np.float32)


def _quantize_blocks(weight: jax.Array) -> tuple[jax.Array, ...]:
    return quantize_blocks(weight, fp8.BLOCK, fp8.BLOCK)


def _quantize_halves(weight: jax.Array) -> tuple[jax.Array, ...]:
    values, scales = quantize_matrices(weight)
    return values, scales[:, 0], scales[:, 1]


def _split(weight: np.ndarray, terms: int) -> np.ndarray:
    return split_router_weight(weight, terms).parts
