"""Which model class serves which architecture name of a Hugging Face config.json."""

from typing import Any

from jax_hpc.models.qwen3_moe import Qwen3MoE

MODELS: dict[str, Any] = {
    "Qwen3MoeForCausalLM": Qwen3MoE,
}
