"""Time to first token and per output token of a whole model: ``python -m benchmarks.generate``.

The model has the sizes of Qwen3-30B-A3B (its published config.json) and random weights, which
spread the routing over all experts; its experts are block fp8, as in the published fp8 checkpoint.
Each form of the operators generates from the same random prompts through
``jax_hpc.generate.Generator``, twice: the second time is taken, so that no compilation is in it. A
line of JSON per form goes to standard output, and to the results file ``--out``.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.results import Results, sources_hash
from benchmarks.rows import CASE_KEYS
from benchmarks.worker import meta
from jax_hpc.generate import Generator
from jax_hpc.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig, SparseMLP
from jax_hpc.types import Implementations

QWEN3_30B = Qwen3MoEConfig(
    vocab_size=151936,
    hidden_size=2048,
    num_layers=48,
    num_q_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    experts_per_token=8,
    expert_intermediate_size=768,
    dense_intermediate_size=6144,
    sparse_layers=(True,) * 48,
    renormalize=True,
    rms_eps=1e-6,
    rope_theta=1e6,
    max_positions=40960,
    tie_embeddings=False,
    expert_format="fp8_block",
)
FORMS = {
    "xla": Implementations(attention="xla", moe="xla", router="xla"),
    "moe": Implementations(attention="xla"),
    "auto": Implementations(),
}
"""All of XLA's forms; our experts and router with XLA's attention; everything ours."""
OP = "generate"
OPERATORS = (
    "decode_attention",
    "decode_schedule",
    "fused_moe",
    "prefill_attention",
    "qk_norm_rope_append",
    "route_topk",
    "router_gemm",
    "router_topk",
)


def with_layers(config: Qwen3MoEConfig, count: int) -> Qwen3MoEConfig:
    """The same model, `count` layers of it."""
    sparse = config.sparse_layers[:count]
    return dataclasses.replace(config, num_layers=count, sparse_layers=sparse)


def use(model: Qwen3MoE, forms: Implementations) -> None:
    """Let all layers take these forms; the weights stay."""
    for layer in model.layers:
        layer.self_attn.implementation = forms.attention
        if isinstance(layer.mlp, SparseMLP):
            layer.mlp.gate.implementation = forms.router
            layer.mlp.experts.implementation = forms.moe


def measure(model: Qwen3MoE, prompts: Sequence[Sequence[int]], new: int) -> dict[str, Any]:
    """Milliseconds until the first token and per token after it, all prompts in one batch."""
    longest = max(len(prompt) for prompt in prompts)
    generator = Generator(model, prefill_chunk=len(prompts) * longest)
    compile_seconds = 0.0
    for _ in range(2):
        for _burst in generator.stream(prompts, max_new_tokens=new):
            pass
        compile_seconds += generator.stats.compile_seconds
    stats = generator.stats
    return {
        "ttft_ms": round(1e3 * stats.ttft_seconds, 3),
        "tpot_ms": round(1e3 * stats.tpot_seconds, 3),
        "compile_s": round(compile_seconds, 1),
    }


def main(arguments: Sequence[str] | None = None, config: Qwen3MoEConfig = QWEN3_30B) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__)
    parser.add_argument("--forms", default=",".join(FORMS), help="of " + ", ".join(FORMS))
    parser.add_argument("--layers", type=int, default=config.num_layers)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=33, help="tokens to generate")
    parser.add_argument("--out", type=Path, help="file to add the rows to")
    options = parser.parse_args(arguments)
    model = Qwen3MoE(with_layers(config, options.layers), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, config.vocab_size, (options.batch, options.prompt)).tolist()
    print(f"model of {options.layers} layers on {jax.devices()[0]}", file=sys.stderr, flush=True)
    results = Results(options.out) if options.out else None
    if results is not None:
        results.start(meta())
    sizes = {name: getattr(options, name) for name in CASE_KEYS[OP]}
    source = {"processes": 1, "sources_hash": sources_hash(OPERATORS)}
    for form in options.forms.split(","):
        use(model, FORMS[form])
        measured = measure(model, prompts, options.new)
        row = {"op": OP, "impl": form, **sizes, **measured, **source}
        print(json.dumps(row), flush=True)
        if results is not None:
            results.add(row)


if __name__ == "__main__":
    main()
