"""The recorded logits and tokens of tests/golden, and runs of our models to compare with them."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_hpc.cache import pages_for
from jax_hpc.generate import Generator
from jax_hpc.step import StepInputs
from tests.support import golden_checkpoints

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
PAGE = 64
MARGIN = 1e-3
"""Steps of a smaller top-2 margin may go either way, and end a comparison of tokens."""


@functools.cache
def manifest() -> dict[str, Any]:
    return json.loads((GOLDEN / "manifest.json").read_text())


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as stored:
        return dict(stored)


def write_tiny(directory: Path, name: str) -> Path:
    """One of the tiny checkpoints, from its recipe; it must be the one that the golden is of."""
    tensors = golden_checkpoints.make_tensors(golden_checkpoints.RECIPES[name])
    digest = golden_checkpoints.tensor_hash(tensors)
    assert digest == manifest()[name]["tensors_sha256"], "not the tensors the goldens are of"
    return golden_checkpoints.write_checkpoint(directory, name)


def prefill_inputs(tokens: np.ndarray) -> StepInputs:
    """One prompt as one prefill step."""
    count = len(tokens)
    return StepInputs(
        tokens=jnp.asarray(tokens),
        positions=jnp.arange(count, dtype=jnp.int32),
        slots=jnp.arange(count, dtype=jnp.int32),
        page_table=jnp.arange(pages_for(count, PAGE), dtype=jnp.int32)[None],
        kv_lens=jnp.array([count], jnp.int32),
        q_starts=jnp.array([0], jnp.int32),
        q_lens=jnp.array([count], jnp.int32),
        max_q_len=count,
    )


def logits_of(
    model: Any, tokens: np.ndarray, positions: np.ndarray, **cache_options: Any
) -> np.ndarray:
    """Logits at some positions of a prompt, by one prefill step."""
    graph, params = nnx.split(model)

    @jax.jit
    def run(params: Any, inputs: StepInputs, cache: Any, positions: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        hidden, _ = model(inputs, cache)
        return model.logits(hidden[positions])

    cache = model.new_cache(pages_for(len(tokens), PAGE), PAGE, **cache_options)
    return np.asarray(run(params, prefill_inputs(tokens), cache, positions))


def greedy(model: Any, prompt: np.ndarray, steps: int, **options: Any) -> np.ndarray:
    """Tokens that the generator continues a prompt with."""
    generator = Generator(model, page_size=PAGE, **options)
    bursts = generator.stream([prompt.tolist()], max_new_tokens=steps)
    return np.concatenate([burst.tokens[:, 0] for burst in bursts])[:steps]


def agreeing_steps(got: np.ndarray, want: np.ndarray, margins: np.ndarray) -> int:
    """Steps before the first one that may go either way; tokens must agree until there."""
    clear = margins >= MARGIN
    steps = len(want) if clear.all() else int(np.argmin(clear))
    np.testing.assert_array_equal(got[:steps], want[:steps])
    return steps
