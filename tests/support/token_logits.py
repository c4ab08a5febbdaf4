"""Random logits for the sampling tests, and the tokens that a batch's filters keep."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_hpc import sampling
from jax_hpc._token_filters import allowed_tokens

B, V = 8, 1531


@jax.jit
def allowed(logits, params):
    return allowed_tokens(
        logits,
        jnp.exp(sampling._tempered(logits, params.temperature)),
        params.top_k,
        params.top_p,
        params.min_p,
    )


def logits_of(rng, batch=B, vocab=V):
    """Random logits with ties (a grid of sixteenths), a -inf and a spread of scales by row."""
    scale = np.linspace(0.5, 6, batch)[:, None]
    logits = np.round(rng.standard_normal((batch, vocab)) * scale * 16) / 16
    logits[:, 3] = -np.inf
    return logits.astype(np.float32)
