"""Models of published sizes for whole-model runs, whole or as one rank of tensor parallelism.

Sizes are those of the published config.json files; weights are made on the device.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_hpc import fp8
from jax_hpc.models import Hy3, Hy3Config, Qwen3MoE, Qwen3MoEConfig
from jax_hpc.models.decoder import DecoderConfig
from jax_hpc.nn.moe import ExpertFormat

_QWEN3: dict[str, Any] = dict(
    vocab_size=151936,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    experts_per_token=8,
    renormalize=True,
    rms_eps=1e-6,
    rope_theta=1e6,
    max_positions=40960,
    tie_embeddings=False,
)
QWEN3_30B = Qwen3MoEConfig(
    **_QWEN3,
    hidden_size=2048,
    num_layers=48,
    num_q_heads=32,
    expert_intermediate_size=768,
    dense_intermediate_size=6144,
    sparse_layers=(True,) * 48,
)
QWEN3_235B = Qwen3MoEConfig(
    **_QWEN3,
    hidden_size=4096,
    num_layers=94,
    num_q_heads=64,
    expert_intermediate_size=1536,
    dense_intermediate_size=12288,
    sparse_layers=(True,) * 94,
)
HY3 = Hy3Config(
    vocab_size=120832,
    hidden_size=4096,
    num_layers=80,
    num_q_heads=64,
    num_kv_heads=8,
    head_dim=128,
    num_experts=192,
    experts_per_token=8,
    expert_intermediate_size=1536,
    dense_intermediate_size=13312,
    sparse_layers=(False,) + (True,) * 79,
    renormalize=True,
    rms_eps=1e-5,
    rope_theta=11158840.0,
    max_positions=40960,
    tie_embeddings=False,
    scoring="sigmoid",
    use_router_bias=True,
    router_scale=2.826,
    shared_intermediate_size=1536,
)
"""The model has 262144 positions; a table of fewer is enough here."""


def rank_of(config: DecoderConfig, size: int) -> Any:
    """One rank's part under tensor parallelism: heads, intermediate sizes and vocabulary cut.

    Fewer KV heads than ranks are repeated. Blocks of scales are cut in half where the expert's
    part does not end on a whole one.
    """
    width = config.expert_intermediate_size // size
    return dataclasses.replace(
        config,
        vocab_size=config.vocab_size // size,
        num_q_heads=config.num_q_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        expert_intermediate_size=width,
        dense_intermediate_size=config.dense_intermediate_size // size,
        shared_intermediate_size=config.shared_intermediate_size // size,
        block_rows=fp8.BLOCK if width % fp8.BLOCK == 0 else fp8.BLOCK // 2,
    )


@dataclasses.dataclass(frozen=True)
class Model:
    """A class, its sizes, and the format of its published fp8 checkpoint."""

    model: type
    config: Any
    format: ExpertFormat

    def configured(self, format: ExpertFormat | None, layers: int | None) -> Any:
        """The sizes with a weight format and a number of layers, the model's own by default."""
        format = format or self.format
        count = self.config.num_layers if layers is None else layers
        return dataclasses.replace(
            self.config,
            num_layers=count,
            sparse_layers=self.config.sparse_layers[:count],
            expert_format=format,
            linear_format="fp8_tensor" if format == "fp8_tensor" else "dense",
        )


MODELS: Mapping[str, Model] = {
    "qwen3-30b": Model(Qwen3MoE, QWEN3_30B, "fp8_block"),
    "qwen3-235b-tp8": Model(Qwen3MoE, rank_of(QWEN3_235B, 8), "fp8_block"),
    "hy3-tp8": Model(Hy3, rank_of(HY3, 8), "fp8_tensor"),
}
