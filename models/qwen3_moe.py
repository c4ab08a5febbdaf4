"""Qwen3-MoE: grouped-query attention with QK norm, and experts behind a softmax router.

Sources: the Qwen3 technical report (arXiv 2505.09388) and the published checkpoints' configs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_hpc.checkpoint_plan import ArraySpec
from jax_hpc.models.decoder import Decoder, DecoderConfig, common_settings
from jax_hpc.models.hf_config import HFConfig


@dataclasses.dataclass(frozen=True)
class Qwen3MoEConfig(DecoderConfig):
    """Sizes and switches of a Qwen3-MoE."""

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], stored: Mapping[str, ArraySpec] | None = None
    ) -> "Qwen3MoEConfig":
        """From the parsed config.json of a checkpoint; its tensors, ``stored``, decide nothing.

        Raises:
          ValueError: a key is missing. NotImplementedError: a feature that no published
            Qwen3-MoE checkpoint uses and this model does not have; both name the key.
        """
        del stored
        config = HFConfig("Qwen3-MoE", hf)
        layers = config.size("num_hidden_layers")
        step = config.size("decoder_sparse_step", default=1)
        dense, sliding = config.items("mlp_only_layers") or (), "use_sliding_window"
        return cls(
            **common_settings(config),
            num_experts=config.size("num_experts", "num_local_experts"),
            experts_per_token=config.size("num_experts_per_tok"),
            expert_intermediate_size=config.size("moe_intermediate_size"),
            sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
            renormalize=config.flag("norm_topk_prob", False),
            window=config.size("sliding_window") if config.flag(sliding, False) else None,
        )


class Qwen3MoE(Decoder):
    """Qwen3-MoE language model."""

    Config = Qwen3MoEConfig
