"""Writes tests/golden: logits and greedy tokens of Hugging Face transformers' own models.

    python scripts/make_goldens.py [--only NAME]

Needs torch, transformers, safetensors and ml_dtypes, on a CPU; imports nothing of jax_hpc.
tests/golden/README.md describes the files.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support import golden_checkpoints as tiny  # noqa: E402  (found through sys.path)

OUT = ROOT / "tests" / "golden"
DEMO = ROOT / "models" / "demo_checkpoint"
MODELS = ("HYV3ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
LONG_TEXT = """The `with` statement is a compact way to make sure that a resource is given back.

When the block is entered, the interpreter calls a method of the object and binds its result to
the name after `as`. When the block is left, for whatever reason, a second method is called. It
gets the exception, if there was one, and may return true to say that it has been dealt with.

```
with open("notes.txt") as file:
    for line in file:
        print(line.strip())
```

In this example the file is closed at the end even if one of its lines can not be decoded. Without
the statement, the same would take a `try` statement with a `finally` clause. A function can be"""


@dataclass(frozen=True)
class Case:
    """One prompt: text (raw or a chat question) or token ids, and how far to go on from it."""

    name: str
    text: str | None = None
    chat: bool = False
    tokens: tuple[int, ...] = ()
    greedy_steps: int = 96
    every: int = 1  # logits are kept at every n-th position and the last


DEMO_CASES = (
    Case("raw", "The `for` statement"),
    Case("chat", "Explain the assert statement.", chat=True),
    Case("chat_ends", "What are type objects?", chat=True),
    Case("raw_long", LONG_TEXT, every=16, greedy_steps=0),
)


def random_case(name: str, seed: int, length: int, steps: int = 96) -> Case:
    """A prompt of random tokens below 512."""
    tokens = np.random.default_rng(seed).integers(0, 512, length)
    return Case(name, tokens=tuple(int(token) for token in tokens), greedy_steps=steps)


def load(directory: Path, dtype: torch.dtype) -> Any:
    """transformers' model with its plain attention and plain loop over experts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    if type(model).__name__ not in MODELS:
        raise TypeError(f"{directory} loaded as {type(model).__name__}")
    return model.eval()


def encode(case: Case, directory: Path) -> list[int]:
    """Token ids of the prompt."""
    if case.text is None:
        return list(case.tokens)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    if not case.chat:
        return tokenizer(case.text).input_ids
    messages = [{"role": "user", "content": case.text}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text).input_ids


def prompt_logits(model: Any, tokens: list[int]) -> np.ndarray:
    """Logits [S, V] as float32, whatever the model's dtype."""
    return model(torch.tensor([tokens])).logits[0].float().numpy()


def greedy(model: Any, tokens: list[int], steps: int, stops: set[int]) -> tuple[list[int], Any]:
    """(tokens, lead of the best logit over the next) of the continuation, to a stop token.

    Recomputes the whole sequence at each step: slow, and free of the ways of any cache class.
    """
    chosen: list[int] = []
    margins: list[float] = []
    while len(chosen) < steps and not (chosen and chosen[-1] in stops):
        logits = model(torch.tensor([tokens + chosen]), use_cache=False).logits[0, -1]
        best = logits.topk(2)
        chosen.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return chosen, np.asarray(margins, np.float32)


def run_cases(directory: Path, cases: tuple[Case, ...], with_bf16: bool) -> dict[str, np.ndarray]:
    """All arrays of one golden file."""
    model = load(directory, torch.float32)
    half = load(directory, torch.bfloat16) if with_bf16 else None
    end = model.generation_config.eos_token_id
    stops = set(end if isinstance(end, list) else [] if end is None else [end])
    arrays: dict[str, np.ndarray] = {}
    for case in cases:
        tokens = encode(case, directory)
        positions = sorted({*range(0, len(tokens), case.every), len(tokens) - 1})
        arrays[f"{case.name}.tokens"] = np.asarray(tokens, np.int32)
        arrays[f"{case.name}.positions"] = np.asarray(positions, np.int32)
        arrays[f"{case.name}.logits"] = prompt_logits(model, tokens)[positions]
        if half is not None:
            arrays[f"{case.name}.logits_bf16"] = prompt_logits(half, tokens)[positions]
        line = f"{directory.name} {case.name}: {len(tokens)} prompt tokens"
        if case.greedy_steps:
            chosen, margins = greedy(model, tokens, case.greedy_steps, stops)
            arrays[f"{case.name}.greedy"] = np.asarray(chosen, np.int32)
            arrays[f"{case.name}.margins"] = margins
            line += f", {len(chosen)} greedy, least margin {margins.min():.4f}"
        print(line)
    return arrays


def describe(cases: tuple[Case, ...]) -> dict[str, Any]:
    """The prompts that are texts, for the manifest."""
    return {case.name: {"text": case.text, "chat": case.chat} for case in cases if case.text}


def make_demo() -> dict[str, Any]:
    """Goldens of the demo checkpoint."""
    arrays = run_cases(DEMO, DEMO_CASES, with_bf16=True)
    np.savez_compressed(OUT / "demo.npz", **arrays)  # pyright: ignore[reportArgumentType]
    return {"prompts": describe(DEMO_CASES)}


def make_tiny(name: str, seed: int) -> dict[str, Any]:
    """Goldens of one tiny random checkpoint; a quantised one runs as its float32 equal."""
    recipe = tiny.RECIPES[name]
    tensors = tiny.make_tensors(recipe)
    cases = (random_case("short", seed, 20), random_case("long", seed + 1, 150, steps=0))
    cases = (cases[0], replace(cases[1], every=16))
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / name
        dense = tiny.dequantize(tensors) if recipe.fp8 else tensors
        config = tiny.make_config(replace(recipe, fp8=""))
        drafts = f"model.layers.{recipe.layers}."
        dense = {name: value for name, value in dense.items() if not name.startswith(drafts)}
        tiny.write_files(directory, config, dense, recipe.shards)
        arrays = run_cases(directory, cases, with_bf16=not recipe.fp8)
    np.savez_compressed(OUT / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType]
    return {"tensors_sha256": tiny.tensor_hash(tensors), "prompt_seed": seed}


def main() -> None:
    """Writes every golden file and the manifest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="one golden file, such as demo or tiny_fp8")
    only = parser.parse_args().only
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    makers = {"demo": make_demo}
    makers |= {name: lambda n=name, s=seed: make_tiny(n, s) for name, seed in PROMPT_SEEDS.items()}
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions |= {"python": platform.python_version(), "numpy": np.__version__}
    manifest["versions"] = versions
    for name, make in makers.items():
        if only in (None, name):
            manifest[name] = make()
    path.write_text(json.dumps(manifest, indent=2) + "\n")


# Prompts whose greedy continuation has no near-ties (see the README beside the goldens).
PROMPT_SEEDS = {
    "tiny": 14,
    "tiny_dense_tied": 20,
    "tiny_fp8": 10,
    "tiny_qwen3": 31,
    "tiny_qwen3_fp8": 59,
    "tiny_hy3": 41,
    "tiny_hy3_fp8": 44,
}

if __name__ == "__main__":
    main()
