"""Which model class serves which architecture name of a Hugging Face config.json."""

from typing import Any

from jax_hpc.models.hy3 import Hy3
from jax_hpc.models.qwen3 import Qwen3
from jax_hpc.models.qwen3_moe import Qwen3MoE

MODELS: dict[str, Any] = {
    "HYV3ForCausalLM": Hy3,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3MoE,
}
