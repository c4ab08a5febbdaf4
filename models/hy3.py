"""Hy3 (Hunyuan V3) and its smaller relatives: a sigmoid router with a selection bias, and an
expert that every token takes.

Sources: config.json and the tensor names of the published checkpoints (tencent/Hy3 and its fp8
form, Hy-MT2-30B-A3B). Attention is Qwen3's: no biases, QK norm before RoPE.

- The first layers are dense, the others sparse.
- s = sigmoid(x W^T) in float32; the experts are those of the largest s + bias; their weights are
  s without the bias, divided by their sum, times ``router_scaling_factor``.
- The shared expert is added to the experts' sum in float32, with one rounding, which serves
  ``enable_moe_fp32_combine`` on and off.
- The layers after the last one draft tokens and are not loaded.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_hpc._checks import check_choice
from jax_hpc.checkpoint_plan import ArraySpec
from jax_hpc.models.decoder import Decoder, DecoderConfig, common_settings
from jax_hpc.models.decoder_checkpoint import Names
from jax_hpc.models.hf_config import HFConfig

NAMES = Names(
    router="mlp.router.gate.weight",
    router_bias="mlp.expert_bias",
    shared_mlp="mlp.shared_mlp",
    draft_layers=1,
)


@dataclasses.dataclass(frozen=True)
class Hy3Config(DecoderConfig):
    """Sizes and switches of a Hy3."""

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], stored: Mapping[str, ArraySpec] | None = None
    ) -> "Hy3Config":
        """From the parsed config.json of a checkpoint, and its tensors ``stored``.

        The router's and the head's weights take part in float32. Published checkpoints store
        them in bf16, which loses nothing; where one stores them in float32 they are kept so.

        Raises:
          ValueError: a key is missing. NotImplementedError: a feature that no published
            checkpoint uses and this model does not have; both name the key.
        """
        config = HFConfig("Hy3", hf)
        config.require("qk_norm", True)
        config.require("mlp_bias", False)
        config.require("moe_router_use_sigmoid", True)
        settings = common_settings(config)
        sparse = _sparse_layers(config, settings["num_layers"])
        width = config.size("moe_intermediate_size", "expert_hidden_dim")
        stored = stored or {}
        routers = [f"model.layers.{i}.{NAMES.router}" for i, has in enumerate(sparse) if has]
        wide_router = any(_is_float32(stored, name) for name in routers)
        return cls(
            **settings,
            num_experts=config.size("num_experts", "num_local_experts"),
            experts_per_token=config.size("num_experts_per_tok"),
            expert_intermediate_size=width,
            sparse_layers=sparse,
            renormalize=config.flag("route_norm", True),
            scoring="sigmoid",
            use_router_bias=config.flag("moe_router_enable_expert_bias", True),
            router_scale=config.number("router_scaling_factor"),
            shared_intermediate_size=width * config.size("num_shared_experts", default=1, least=0),
            router_terms=3 if wide_router else None,
            float32_head=config.flag("enable_lm_head_fp32", False)
            and _is_float32(stored, "lm_head.weight"),
        )


def _sparse_layers(config: HFConfig, layers: int) -> tuple[bool, ...]:
    """transformers 5 lists every layer's kind; published checkpoints count the dense ones."""
    kinds = config.items("mlp_layer_types")
    if kinds is not None:
        known = {"dense": False, "sparse": True}
        for kind in kinds:
            check_choice("Hy3", "mlp_layer_types", kind, known)
        return tuple(known[kind] for kind in kinds)
    dense = config.size("first_k_dense_replace", default=1, least=0)
    return tuple(index >= dense for index in range(layers))


def _is_float32(stored: Mapping[str, ArraySpec], name: str) -> bool:
    return name in stored and stored[name].dtype == np.float32


class Hy3(Decoder):
    """Hy3 language model."""

    Config = Hy3Config
    names = NAMES
