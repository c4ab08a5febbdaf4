"""Time and peak host memory of loading: ``python -m benchmarks.loading --dir DIR --layers 6``.

Writes a checkpoint of Qwen3-30B-A3B's sizes in shards of random bytes' worth of bf16, as many
layers of it as fit on the disk, unless DIR holds one, and loads it in a process of its own. The
peak counts what that process added to its resident memory while it loaded. On a machine without
a GPU the arrays would lie in the host's memory themselves: there each is dropped once it has been
copied, so that the peak is the loader's own. A line of JSON goes to standard output, and to the
results file ``--out``, below a row that says which machine it was.
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from benchmarks.model_sizes import MODELS, Model
from benchmarks.results import Results
from benchmarks.worker import meta
from jax_hpc.loading import fill, load_model
from jax_hpc.models import Qwen3MoEConfig

OP = "loading"
SHARD_BYTES = 4 << 30
"""About the size of the shards of its checkpoint."""


def config_of(config: Qwen3MoEConfig) -> dict[str, Any]:
    """config.json of a model of these sizes."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_intermediate_size,
        "intermediate_size": config.dense_intermediate_size,
        "norm_topk_prob": config.renormalize,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "bfloat16",
    }


def shapes_of(config: Qwen3MoEConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint."""
    hidden, head_dim = config.hidden_size, config.head_dim
    width, vocab = config.expert_intermediate_size, config.vocab_size
    q, kv = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, hidden)}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.{n}_layernorm": (hidden,) for n in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{n}_norm": (head_dim,) for n in "qk"}
        rows = {"q": q, "k": kv, "v": kv}
        shapes |= {f"{layer}.self_attn.{n}_proj": (rows[n], hidden) for n in rows}
        shapes[f"{layer}.self_attn.o_proj"] = (hidden, q)
        shapes[f"{layer}.mlp.gate"] = (config.num_experts, hidden)
        for expert in range(config.num_experts):
            name = f"{layer}.mlp.experts.{expert}"
            shapes |= {f"{name}.{n}_proj": (width, hidden) for n in ("gate", "up")}
            shapes[f"{name}.down_proj"] = (hidden, width)
    shapes |= {"model.norm": (hidden,), "lm_head": (vocab, hidden)}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def shards_of(shapes: Mapping[str, tuple[int, ...]], limit: int) -> Iterator[list[str]]:
    """Names of the tensors of each shard: as many as fit, in the checkpoint's order."""
    names: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        if names and filled + size > limit:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    yield names


def write(directory: Path, config: Qwen3MoEConfig, shard_bytes: int) -> None:
    """The checkpoint, a tensor at a time: a shard need not fit into memory."""
    directory.mkdir(parents=True, exist_ok=True)
    shapes, weight_map = shapes_of(config), {}
    pool = np.random.default_rng(0).standard_normal(1 << 22, np.float32)
    pool = pool.astype(ml_dtypes.bfloat16)
    for number, names in enumerate(shards_of(shapes, shard_bytes)):
        file = f"model-{number:05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        _write_shard(directory / file, {name: shapes[name] for name in names}, pool)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    # Last, so that a directory with a config is a whole checkpoint.
    (directory / "config.json").write_text(json.dumps(config_of(config)))


def _write_shard(path: Path, shapes: Mapping[str, tuple[int, ...]], pool: np.ndarray) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            rest = int(np.prod(shape))
            while rest:
                part = pool[: min(rest, pool.size)]
                file.write(part.tobytes())
                rest -= part.size


def peak_bytes() -> int:
    """The most resident memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def host() -> str:
    """The machine whose memory and disk are measured."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = found[1] if found else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{name}, {os.cpu_count()} CPUs, {memory / 1e9:.0f} GB"


def measure(directory: Path, quantize: Any) -> dict[str, Any]:
    """Loads the checkpoint in this process, which should have done nothing before."""
    on_host = jax.default_backend() == "cpu"
    if on_host:
        fill.place = _drop
    jax.block_until_ready(jax.device_put(np.zeros(1)))
    before, begin = peak_bytes(), time.perf_counter()
    loaded = load_model(directory, quantize=quantize, progress=False, tokenizer=False)
    jax.block_until_ready(fill.named_arrays(loaded.model))
    seconds = time.perf_counter() - begin
    files = [path.stat().st_size for path in directory.glob("*.safetensors")]
    return {
        "op": OP,
        "arrays": "dropped" if on_host else "kept",
        "quantize": quantize,
        "layers": loaded.config.num_layers,
        "checkpoint_gb": round(sum(files) / 1e9, 2),
        "largest_shard_gb": round(max(files) / 1e9, 2),
        "peak_host_gb": round((peak_bytes() - before) / 1e9, 3),
        "seconds": round(seconds, 1),
        "gb_per_s": round(sum(files) / seconds / 1e9, 2),
    }


def _drop(host: np.ndarray, target: str, device: Any) -> jax.Array:
    del target, device
    return jax.device_put(np.zeros((), host.dtype))


def _report(directory: Path, quantize: Any, queue: Any) -> None:
    # Both from here: on a GPU the parent would hold memory of it, once it had asked what it is.
    row = measure(directory, quantize)
    queue.put(({**meta(), "host": host()}, row))


def main(
    arguments: Sequence[str] | None = None,
    model: Model = MODELS["qwen3-30b"],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="where the checkpoint is or goes")
    parser.add_argument("--layers", type=int, default=6, help="1.23 GB each; the model has 48")
    parser.add_argument("--quantize", choices=("fp8_block", "fp8_tensor"), help="on a GPU")
    parser.add_argument("--out", type=Path, help="file to add the row to")
    options = parser.parse_args(arguments)
    most = model.config.num_layers
    if not 1 <= options.layers <= most:
        parser.error(f"--layers must be from 1 to {most}, got {options.layers}")
    if not (options.dir / "config.json").exists():
        write(options.dir, model.configured("dense", options.layers), shard_bytes)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_report, args=(options.dir, options.quantize, queue))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"loading failed with code {process.exitcode}")
    machine, row = queue.get()
    print(json.dumps(row))
    if options.out:
        results = Results(options.out)
        results.start(machine)
        results.add(row)


if __name__ == "__main__":
    main()
