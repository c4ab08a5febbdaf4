"""Trains the demo checkpoint: a Qwen3-MoE of about 2.5 million parameters on Python's own text.

    python scripts/train_demo_checkpoint.py --out models/demo_checkpoint

Needs ``pip install jax optax tokenizers safetensors`` (no extra of jax_hpc, which it does not
import, has all of them). A few minutes on one recent GPU; on a CPU use --steps to try it out.
Seeds are fixed; a GPU's sums may differ in their last bits.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_corpus import HELD_OUT_MODULES, HELD_OUT_TOPICS, Entry, load_corpus
from demo_model import (
    Config,
    Params,
    forward,
    hf_tensors,
    init_params,
    save_config,
    save_shards,
    to_bfloat16,
)
from demo_tokenizer import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    chat,
    held_out_documents,
    save_tokenizer,
    token_id,
    train_tokenizer,
    training_documents,
)
from jax import Array
from tokenizers import Tokenizer

BALANCE_LOSS = 0.01
Evaluator = Callable[[Params], tuple[float, int]]
HERE = Path(__file__).parent


class Data(NamedTuple):
    """Training tokens in one stream, where its documents start, and the held-out tokens."""

    stream: np.ndarray
    starts: np.ndarray
    held_out: np.ndarray
    held_out_bytes: int


def encode(tokenizer: Tokenizer, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """(stream, starts): every document follows an end-of-text token and starts after it."""
    end = token_id(tokenizer, END_OF_TEXT)
    encoded = [[end, *e.ids] for e in tokenizer.encode_batch(documents)]
    starts = np.cumsum([1, *(len(ids) for ids in encoded[:-1])])
    return np.concatenate([np.asarray(ids, np.int32) for ids in encoded]), starts


def load_data(tokenizer: Tokenizer, entries: list[Entry], seed: int) -> Data:
    """Encodes the training and the held-out documents."""
    stream, starts = encode(tokenizer, training_documents(entries, seed))
    held = held_out_documents(entries)
    return Data(stream, starts, encode(tokenizer, held)[0], sum(len(t.encode()) for t in held))


def draw_windows(data: Data, shape: tuple[int, ...], length: int, seed: int) -> np.ndarray:
    """Where training windows begin: half at a document's start, half anywhere."""
    rng = np.random.default_rng(seed)
    last = len(data.stream) - length - 1
    anywhere = rng.integers(0, last, shape)
    documents = data.starts[data.starts < last]
    at_start = documents[rng.integers(0, len(documents), shape)]
    return np.where(rng.random(shape) < 0.5, at_start, anywhere).astype(np.int32)


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Nats per position."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def make_trainer(config: Config, optimizer: Any, dropout: float, length: int) -> Any:
    """A jitted function that runs one step per row of `windows` without leaving the device."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16

    def loss_fn(params: Params, batch: Array, key: Array) -> tuple[Array, tuple[Array, Array]]:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        logits, balance = forward(params, inputs, config, dtype=dtype, dropout=dropout, key=key)
        loss = cross_entropy(logits, targets).mean()
        return loss + BALANCE_LOSS * balance, (loss, balance)

    @partial(jax.jit, donate_argnums=(0, 1))
    def run(params: Params, state: Any, stream: Array, windows: Array, key: Array) -> Any:
        def step(carry: Any, row: Array) -> Any:
            params, state, key = carry
            key, subkey = jax.random.split(key)
            batch = stream[row[:, None] + jnp.arange(length + 1)]
            grads, metrics = jax.grad(loss_fn, has_aux=True)(params, batch, subkey)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state, key), metrics

        (params, state, key), metrics = jax.lax.scan(step, (params, state, key), windows)
        return params, state, key, jax.tree.map(jnp.mean, metrics)

    return run


def make_evaluator(config: Config, tokens: np.ndarray, length: int = 1024) -> Evaluator:
    """A function of the parameters: (nats in all, tokens predicted), each token once."""
    windows = range(0, len(tokens) - 1, length)
    inputs = np.zeros((len(windows), length), np.int32)
    targets = np.full((len(windows), length), -1, np.int32)
    for row, begin in enumerate(windows):
        part = tokens[begin : begin + length + 1]
        inputs[row, : len(part) - 1] = part[:-1]
        targets[row, : len(part) - 1] = part[1:]

    @jax.jit
    def nats(params: Params, x: Array, y: Array) -> Array:
        logits, _ = forward(params, x, config)
        return jnp.sum(jnp.where(y >= 0, cross_entropy(logits, jnp.maximum(y, 0)), 0.0))

    def evaluate(params: Params) -> tuple[float, int]:
        with jax.default_matmul_precision("highest"):
            pairs = zip(inputs, targets, strict=True)
            total = sum(float(nats(params, x[None], y[None])) for x, y in pairs)
        return total, int((targets >= 0).sum())

    return evaluate


def greedy(
    params: Params, config: Config, tokenizer: Tokenizer, prompts: list[str], room: int = 192
) -> list[str]:
    """Greedy continuations up to `room` tokens with the prompt, by plain recomputation."""
    stops = {token_id(tokenizer, END_OF_TEXT), token_id(tokenizer, IM_END)}
    step = jax.jit(lambda tokens, at: jnp.argmax(forward(params, tokens, config)[0][0, at - 1]))
    texts = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt).ids
        buffer = np.zeros((1, room), np.int32)
        buffer[0, : len(ids)] = ids
        end = len(ids)
        while end < room and (token := int(step(buffer, end))) not in stops:
            buffer[0, end] = token
            end += 1
        texts.append(tokenizer.decode(buffer[0, len(ids) : end].tolist()))
    return texts


def train(
    args: argparse.Namespace, config: Config, data: Data, evaluate: Evaluator
) -> tuple[Params, float]:
    """Runs all steps, printing a line per chunk: (parameters, last training loss)."""
    chunk = min(args.chunk, args.steps)
    steps = args.steps // chunk * chunk
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.rate, max(steps // 50, 1), steps)
    matrices = partial(jax.tree.map, lambda x: x.ndim > 1)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=args.weight_decay, mask=matrices)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    params = init_params(config, jax.random.key(args.seed))
    state = optimizer.init(params)
    run = make_trainer(config, optimizer, args.dropout, args.length)
    stream, key = jnp.asarray(data.stream), jax.random.key(args.seed + 1)
    windows = draw_windows(data, (steps // chunk, chunk, args.batch), args.length, args.seed)
    begin, loss = time.perf_counter(), math.nan
    for number, rows in enumerate(windows, start=1):
        params, state, key, metrics = run(params, state, stream, rows, key)
        loss, balance = map(float, metrics)
        nats, count = evaluate(params)
        print(
            f"step {number * chunk:6d}/{steps}  train {loss:.3f}  held-out {nats / count:.3f}"
            f"  balance {balance:.3f}  {time.perf_counter() - begin:6.1f} s",
            flush=True,
        )
    return params, loss


def save(
    args: argparse.Namespace,
    config: Config,
    params: Params,
    tokenizer: Tokenizer,
    facts: dict[str, Any],
) -> None:
    """Writes the checkpoint directory."""
    args.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, args.out, config.context)
    end, pad = (token_id(tokenizer, token) for token in (IM_END, END_OF_TEXT))
    save_config(config, args.out, end, pad)
    save_shards(hf_tensors(params), args.out)
    facts |= {
        "experts": config.experts,
        "top_k": config.top_k,
        "topics": ", ".join(HELD_OUT_TOPICS),
        "modules": ", ".join(HELD_OUT_MODULES),
        "device": jax.devices()[0].device_kind,
    }
    for name in ("README.md", "LICENSE.txt"):
        template = (HERE / "demo_templates" / name).read_text()
        (args.out / name).write_text(template.format(**vars(args), **facts))
    for path in args.out.iterdir():
        path.chmod(0o644)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--corpus", type=Path, help="file of demo_corpus.py, else this Python's")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--chunk", type=int, default=500, help="steps between printed lines")
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--length", type=int, default=1024, help="tokens per window")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Corpus, tokenizer, training, held-out measurement, checkpoint."""
    args = parse_arguments()
    corpus = load_corpus(args.corpus)
    entries = corpus.entries
    tokenizer = train_tokenizer(entries)
    data = load_data(tokenizer, entries, args.seed)
    config = Config(vocab=tokenizer.get_vocab_size())
    print(f"{len(data.stream):,} training tokens, {len(data.held_out):,} held out")
    evaluate = make_evaluator(config, data.held_out)
    params, loss = train(args, config, data, evaluate)
    rounded = to_bfloat16(params)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), rounded)
    nats, count = evaluate(params)
    facts = {
        "version": corpus.python,
        "digest": corpus.digest,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "perplexity": math.exp(nats / count),
        "bits": nats / math.log(2) / data.held_out_bytes,
        "held_tokens": count,
        "held_bytes": data.held_out_bytes,
        "loss": loss,
    }
    save(args, config, rounded, tokenizer, facts)
    print(facts)
    question = chat([("user", "What is the for statement?")]) + f"{IM_START}assistant\n"
    prompts = [question, "# The `while` statement\n\n", "A list is"]
    for prompt, text in zip(prompts, greedy(params, config, tokenizer, prompts), strict=True):
        print(f"--- {prompt!r}\n{text}")


if __name__ == "__main__":
    main()
