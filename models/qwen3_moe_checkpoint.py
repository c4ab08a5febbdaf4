"""Names of Qwen3-MoE's tensors in Hugging Face checkpoints, and the parameters they fill."""

import functools
from typing import TYPE_CHECKING

import numpy as np

from jax_hpc.checkpoint_plan import (
    LoadItem,
    block_scale_shape,
    concat,
    constant,
    scale_name,
    single,
    stack_experts,
)
from jax_hpc.ops.router_gemm import split_router_weight
from jax_hpc.rope import rope_table

if TYPE_CHECKING:
    from jax_hpc.models.qwen3_moe import Qwen3MoEConfig


def plan(config: "Qwen3MoEConfig", router_terms: int) -> list[LoadItem]:
    """Every parameter of the model, in the order in which checkpoints store layers."""
    hidden, vocab = config.hidden_size, config.vocab_size
    items = [single("embed_tokens.weight", "model.embed_tokens.weight", (vocab, hidden))]
    for index, sparse in enumerate(config.sparse_layers):
        items += _attention(config, index)
        items += _sparse(config, index, router_terms) if sparse else _dense(config, index)
    items.append(single("norm.weight", "model.norm.weight", (hidden,)))
    if not config.tie_embeddings:
        items.append(single("lm_head.weight", "lm_head.weight", (vocab, hidden)))
    table = rope_table(config.max_positions, config.head_dim, config.rope_theta)
    items.append(constant("cos_sin", table))
    return items


def _attention(config: "Qwen3MoEConfig", index: int) -> list[LoadItem]:
    layer, source = f"layers.{index}", f"model.layers.{index}"
    attention, tensor = f"{layer}.self_attn", f"{source}.self_attn"
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
    one = np.ones((), np.float32)
    norms = ("input_layernorm", "post_attention_layernorm")
    return [
        *(single(f"{layer}.{n}.weight", f"{source}.{n}.weight", (hidden,)) for n in norms),
        concat(
            f"{attention}.qkv_proj.weight",
            [
                (f"{tensor}.q_proj.weight", (q, hidden)),
                (f"{tensor}.k_proj.weight", (kv, hidden)),
                (f"{tensor}.v_proj.weight", (kv, hidden)),
            ],
            quantizable=True,
        ),
        single(
            f"{attention}.o_proj.weight", f"{tensor}.o_proj.weight", (hidden, q), quantizable=True
        ),
        single(f"{attention}.q_norm", f"{tensor}.q_norm.weight", (head_dim,)),
        single(f"{attention}.k_norm", f"{tensor}.k_norm.weight", (head_dim,)),
        # No Qwen3-MoE checkpoint holds KV scales: an fp8 cache stores the values as they are.
        constant(f"{attention}.k_scale", one),
        constant(f"{attention}.v_scale", one),
    ]


def _dense(config: "Qwen3MoEConfig", index: int) -> list[LoadItem]:
    target, source = f"layers.{index}.mlp", f"model.layers.{index}.mlp"
    hidden, width = config.hidden_size, config.dense_intermediate_size
    gate_up = [(f"{source}.{name}_proj.weight", (width, hidden)) for name in ("gate", "up")]
    return [
        concat(f"{target}.gate_up_proj.weight", gate_up, quantizable=True),
        single(
            f"{target}.down_proj.weight",
            f"{source}.down_proj.weight",
            (hidden, width),
            quantizable=True,
        ),
    ]


def _sparse(config: "Qwen3MoEConfig", index: int, router_terms: int) -> list[LoadItem]:
    target, source = f"layers.{index}.mlp", f"model.layers.{index}.mlp"
    hidden, experts = config.hidden_size, config.num_experts
    width = config.expert_intermediate_size
    gate_up = [
        [f"{source}.experts.{e}.{name}_proj.weight" for name in ("gate", "up")]
        for e in range(experts)
    ]
    down = [f"{source}.experts.{e}.down_proj.weight" for e in range(experts)]
    items = [
        single(
            f"{target}.gate.parts",
            f"{source}.gate.weight",
            (experts, hidden),
            transform=functools.partial(_split, terms=router_terms),
        ),
        stack_experts(f"{target}.experts.gate_up", gate_up, (width, hidden)),
        stack_experts(f"{target}.experts.down", down, (hidden, width)),
    ]
    if config.expert_format == "fp8_block":
        items += [
            stack_experts(
                f"{target}.experts.gate_up_scale",
                [[scale_name(name) for name in pair] for pair in gate_up],
                block_scale_shape((width, hidden)),
            ),
            stack_experts(
                f"{target}.experts.down_scale",
                [scale_name(name) for name in down],
                block_scale_shape((hidden, width)),
            ),
        ]
    return items


def _split(weight: np.ndarray, terms: int) -> np.ndarray:
    return split_router_weight(weight, terms).parts
