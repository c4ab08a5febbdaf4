"""Time to first token and per output token of a whole model: ``python -m benchmarks.generate``.

The models have published sizes (benchmarks/model_sizes.py) and random weights, made on the device.
Of the models that need eight GPUs it is one rank of eight by tensor parallelism, without what the
ranks say to each other. Each form of the operators generates from the same random prompts through
``jax_hpc.generate.Generator``, twice: the second time is taken, so that no compilation is in it.

A time is worth something only where the routing is as spread as a trained model's: a row has the
number of distinct experts that the batch's last tokens choose, over the layers, beside what
uniform routing would give. A line of JSON per form goes to standard output, and to the results
file ``--out``.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.model_sizes import MODELS, Model
from benchmarks.results import Results, sources_hash
from benchmarks.worker import meta
from jax_hpc import fp8
from jax_hpc._registry import OPERATORS
from jax_hpc.cache import LayerPages
from jax_hpc.decode import NO_TOKEN, compiler_options
from jax_hpc.generate import SMALLEST_CHUNK, Generator
from jax_hpc.models.decoder import Decoder, SparseMLP
from jax_hpc.nn.moe import ExpertFormat
from jax_hpc.step import StepInputs
from jax_hpc.types import Implementations

FORMS = {
    "xla": Implementations(attention="xla", moe="xla", router="xla", norm="xla"),
    "moe": Implementations(attention="xla", norm="xla"),
    "auto": Implementations(),
}
"""All of XLA's forms; our experts and router among XLA's others; everything ours."""
KV_DTYPES = {"bf16": jnp.bfloat16, "fp8": fp8.E4M3}
OP = "generate"
CONTEXT = 64
"""Tokens by which the routing of each sequence's last one is looked at."""


def use(model: Decoder, forms: Implementations) -> None:
    """Let all layers take these forms; the weights stay."""
    model.norm.implementation = forms.norm
    for layer in model.layers:
        layer.input_layernorm.implementation = forms.norm
        layer.post_attention_layernorm.implementation = forms.norm
        layer.self_attn.implementation = forms.attention
        if isinstance(layer.mlp, SparseMLP):
            layer.mlp.gate.implementation = forms.router
            layer.mlp.experts.implementation = forms.moe


def measure(
    model: Decoder, prompts: Sequence[Sequence[int]], new: int, kv_dtype: Any
) -> tuple[dict[str, Any], list[list[int]]]:
    """Milliseconds until the first token and per token after it, all prompts in one batch; and
    the sequences."""
    longest = max(len(prompt) for prompt in prompts)
    generator = Generator(
        model, prefill_chunk=max(SMALLEST_CHUNK, len(prompts) * longest), kv_cache_dtype=kv_dtype
    )
    compile_seconds = 0.0
    sequences: list[list[int]] = []
    for _ in range(2):
        bursts = list(generator.stream(prompts, max_new_tokens=new))
        tokens = np.concatenate([burst.tokens for burst in bursts]).T
        sequences = [
            [*prompt, *(int(token) for token in row if token != NO_TOKEN)]
            for prompt, row in zip(prompts, tokens, strict=True)
        ]
        compile_seconds += generator.stats.compile_seconds
    stats = generator.stats
    read = model.bytes_per_step(
        len(prompts), round(stats.mean_kv_len), jnp.dtype(kv_dtype).itemsize
    )
    figures = {
        "ttft_ms": round(1e3 * stats.ttft_seconds, 3),
        "tpot_ms": round(1e3 * stats.tpot_seconds, 3),
        "compile_s": round(compile_seconds, 1),
        "read_gb": round(read / 1e9, 6),
    }
    if stats.tpot_seconds:
        figures["gb_per_s"] = round(read / stats.tpot_seconds / 1e9, 1)
    return figures, sequences


def last_choices(model: Decoder, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Experts of the sequences' last tokens, ``[B, K]`` for each sparse layer."""
    rows = np.array([sequence[-CONTEXT:] for sequence in sequences], np.int32)
    batch, length = rows.shape
    position = np.arange(length, dtype=np.int32)
    page = CONTEXT  # a sequence has one
    inputs = StepInputs(
        tokens=jnp.asarray(rows.reshape(-1)),
        positions=jnp.asarray(np.tile(position, batch)),
        slots=jnp.asarray((np.arange(batch)[:, None] * page + position).reshape(-1), jnp.int32),
        page_table=jnp.arange(batch, dtype=jnp.int32)[:, None],
        kv_lens=jnp.full(batch, length, jnp.int32),
        q_starts=jnp.arange(batch, dtype=jnp.int32) * length,
        q_lens=jnp.full(batch, length, jnp.int32),
        max_q_len=length,
    )
    cos_sin = model.cos_sin[...]
    pages = model.new_cache(batch, page).layers
    x, chosen = model.embed_tokens(inputs.tokens), []
    # A layer by itself, so that all of a kind are one compilation.
    run = jax.jit(_run_layer, static_argnums=0, compiler_options=compiler_options(model))
    for layer, of_layer in zip(model.layers, pages, strict=True):
        x, ids = run(*nnx.split(layer), x, inputs, of_layer, cos_sin)
        if ids is not None:
            chosen.append(np.asarray(ids[length - 1 :: length]))
    return chosen


def _run_layer(
    graph: Any,
    params: Any,
    x: jax.Array,
    inputs: StepInputs,
    pages: LayerPages,
    cos_sin: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """A layer's output and its choices."""
    layer: Any = nnx.merge(graph, params)
    y, _ = layer.self_attn(layer.input_layernorm(x), inputs, pages, cos_sin)
    x = x + y
    y = layer.post_attention_layernorm(x)
    ids = layer.mlp.gate(y).ids if isinstance(layer.mlp, SparseMLP) else None
    return x + layer.feed_forward(y, inputs.active), ids


def spread(model: Decoder, sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Distinct experts of a decode step's batch: mean and least over layers, and if uniform.

    Nothing of a model without experts, such as the first, dense layer of Hy3.
    """
    config = model.config
    if not any(config.sparse_layers):
        return {}
    distinct = [len(np.unique(ids)) for ids in last_choices(model, sequences)]
    missed = (1 - config.experts_per_token / config.num_experts) ** len(sequences)
    return {
        "distinct_experts": round(float(np.mean(distinct)), 1),
        "distinct_least": min(distinct),
        "distinct_uniform": round(config.num_experts * (1 - missed), 1),
    }


def main(arguments: Sequence[str] | None = None, models: Mapping[str, Model] = MODELS) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__)
    parser.add_argument("--model", choices=models, default=next(iter(models)))
    parser.add_argument("--format", choices=get_args(ExpertFormat), help="by default its fp8 one")
    parser.add_argument("--forms", default=",".join(FORMS), help="of " + ", ".join(FORMS))
    parser.add_argument("--layers", type=int, help="the first so many of the model's")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=33, help="tokens to generate")
    parser.add_argument("--kv", choices=KV_DTYPES, default="bf16", help="dtype of the KV cache")
    parser.add_argument("--out", type=Path, help="file to add the rows to")
    options = parser.parse_args(arguments)
    forms = options.forms.split(",")
    if unknown := [form for form in forms if form not in FORMS]:
        parser.error(f"--forms must be of {', '.join(FORMS)}, got {unknown[0]!r}")
    chosen = models[options.model]
    most = chosen.config.num_layers
    if options.layers is not None and not 1 <= options.layers <= most:
        parser.error(f"--layers must be from 1 to {most}, got {options.layers}")
    config = chosen.configured(options.format, options.layers)
    model = chosen.model(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, config.vocab_size, (options.batch, options.prompt)).tolist()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))) / 1e9
    print(
        f"{options.model}, {config.num_layers} layers, {held:.1f} GB on {jax.devices()[0]}",
        file=sys.stderr,
        flush=True,
    )
    results = Results(options.out) if options.out else None
    if results is not None:
        results.start(meta())
    case = {
        "model": options.model,
        "layers": config.num_layers,
        "batch": options.batch,
        "prompt": options.prompt,
        "new": options.new,
        "kv": options.kv,
        "format": config.expert_format,
    }
    source = {"processes": 1, "sources_hash": sources_hash(sorted(OPERATORS))}
    for form in forms:
        use(model, FORMS[form])
        measured, sequences = measure(model, prompts, options.new, KV_DTYPES[options.kv])
        row = {"op": OP, "impl": form, **case, **measured, **spread(model, sequences), **source}
        print(json.dumps(row), flush=True)
        if results is not None:
            results.add(row)


if __name__ == "__main__":
    main()
