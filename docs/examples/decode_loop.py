"""From a Hugging Face directory to text: prefill, then bursts of a jit-compiled decode loop."""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jax_hpc.cache import pages_for
from jax_hpc.decode import (
    NO_TOKEN,
    DecodeState,
    PrefillChunk,
    make_decode_loop,
    make_prefill,
    params_of,
)
from jax_hpc.loading import load_model
from jax_hpc.sampling import SamplingParams

DEMO = Path(__file__).parents[2] / "models" / "demo_checkpoint"
PAGE_SIZE, BURST = 64, 16


def generate(directory, prompt, *, new_tokens=48, temperature=0.0):
    """The text that the checkpoint in a directory adds to a prompt."""
    loaded = load_model(directory, progress=False)
    model, tokenizer = loaded.model, loaded.tokenizer
    prompt_ids = tokenizer.encode(prompt)
    limit = len(prompt_ids) + new_tokens
    num_pages = pages_for(limit, PAGE_SIZE)

    cache = model.new_cache(num_pages, PAGE_SIZE)
    state = DecodeState.create(
        page_table=jnp.arange(num_pages, dtype=jnp.int32)[None, :],
        limits=jnp.asarray([limit], jnp.int32),
        eos_ids=jnp.asarray([loaded.generation_config.eos_token_ids], jnp.int32),
        sampling=SamplingParams.create(1, temperature=temperature),
    )
    prompt_chunk = PrefillChunk(
        tokens=jnp.asarray(prompt_ids, jnp.int32),
        q_starts=jnp.asarray([0], jnp.int32),
        q_lens=jnp.asarray([len(prompt_ids)], jnp.int32),
        completes=jnp.asarray([True]),
    )

    params = params_of(model)
    prefill, decode = make_prefill(model), make_decode_loop(model, num_steps=BURST)
    first, cache, state = prefill(params, cache, state, prompt_chunk)
    tokens = [np.asarray(first)]
    while not np.all(np.asarray(state.finished)):  # the host looks once per burst
        burst, cache, state = decode(params, cache, state)
        tokens.append(np.asarray(burst)[:, 0])
    ids = np.concatenate(tokens)
    return tokenizer.decode(ids[ids != NO_TOKEN].tolist())


def main():
    directory = sys.argv[1] if len(sys.argv) > 1 else DEMO
    prompt = "Return a new list"
    print(prompt + generate(directory, prompt))


if __name__ == "__main__":
    main()
