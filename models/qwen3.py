"""Qwen3, the dense models: Qwen3-MoE's attention, and one MLP in each layer.

Sources: the Qwen3 technical report (arXiv 2505.09388) and the published checkpoints' configs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_hpc.checkpoint_plan import ArraySpec
from jax_hpc.models.decoder import Decoder, DecoderConfig, common_settings
from jax_hpc.models.hf_config import HFConfig


@dataclasses.dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """Sizes and switches of a dense Qwen3."""

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], stored: Mapping[str, ArraySpec] | None = None
    ) -> "Qwen3Config":
        """From the parsed config.json of a checkpoint; its tensors, ``stored``, decide nothing.

        Raises:
          ValueError: a key is missing. NotImplementedError: a feature that no published Qwen3
            checkpoint uses and this model does not have; both name the key.
        """
        del stored
        config = HFConfig("Qwen3", hf)
        config.require("use_sliding_window", False)
        settings = common_settings(config)
        return cls(
            **settings,
            num_experts=0,
            experts_per_token=0,
            expert_intermediate_size=0,
            sparse_layers=(False,) * settings["num_layers"],
            renormalize=False,
        )


class Qwen3(Decoder):
    """Dense Qwen3 language model."""

    Config = Qwen3Config
