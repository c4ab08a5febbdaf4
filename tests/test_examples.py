"""The three examples of the documentation run and print what their operators promise."""

import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.numerics import assert_close

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@pytest.fixture
def run_main(capsys, monkeypatch):
    """Run an example as a script would, in this process: -> (what it printed, its names)."""

    def run(name):
        monkeypatch.setattr("sys.argv", [name])
        names = runpy.run_path(str(EXAMPLES / name))
        names["main"]()
        return capsys.readouterr().out, names

    return run


def plain_layer(names, weights, inputs):
    """The primitives' layer over one sequence [n, H], in float64, without a cache: its outputs."""
    w = jax.tree.map(lambda a: np.asarray(a).astype(np.float64), weights)
    heads, kv_heads, dim = names["Q_HEADS"], names["KV_HEADS"], names["HEAD_DIM"]

    def norm(x):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)

    def rotate(x):
        cos, sin = np.split(w["cos_sin"][: len(x), None, :], 2, axis=-1)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def attend(x):
        qkv = (norm(x) @ w["qkv"]).reshape(len(x), -1, dim)
        q = rotate(norm(qkv[:, :heads]))
        k = rotate(norm(qkv[:, heads:-kv_heads])).repeat(heads // kv_heads, axis=1)
        v = qkv[:, -kv_heads:].repeat(heads // kv_heads, axis=1)
        scores = np.einsum("shd,thd->hst", q, k) * dim**-0.5
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        return np.einsum("hst,thd->shd", scores, v).reshape(len(x), -1) @ w["o"]

    def expert(index, x):
        gate, up = w["experts"].gate_up[index] @ x
        return w["experts"].down[index] @ (gate / (1 + np.exp(-gate)) * up)

    def moe(x):
        parts = w["router"].parts
        logits = x @ sum(part / 256.0**i for i, part in enumerate(parts)).T
        out = np.zeros_like(x)
        for row in range(len(x)):
            best = np.argsort(-logits[row])[: names["TOP_K"]]
            share = np.exp(logits[row][best] - logits[row][best].max())
            out[row] = sum(p * expert(e, x[row]) for p, e in zip(share, best, strict=True))
            out[row] /= share.sum()
        return out

    x = inputs + attend(inputs)
    return x + moe(norm(x))


def test_primitives_in_jit(run_main):
    printed, names = run_main("primitives_in_jit.py")
    assert printed.splitlines() == [
        "outputs (20, 2, 128) bfloat16, finite: True",
        "tokens in the cache: [20, 20], updated in place: True",
    ]
    # The same in float32 against a form without operators or cache.
    weights = names["init"](jax.random.key(3), jnp.float32)
    x = jax.random.normal(jax.random.key(4), (2, 128))
    page_table = jnp.asarray([[3, 0], [1, 2]], jnp.int32)
    with jax.default_matmul_precision("highest"):  # the example's own products; a GPU takes TF32
        outputs, _, _ = names["decode"](
            weights,
            x,
            names["new_cache"](jnp.float32),
            page_table,
            jnp.zeros(2, jnp.int32),
            steps=20,
        )
    states = np.concatenate([np.asarray(x)[None], np.asarray(outputs)]).astype(np.float64)
    for sequence in range(2):
        want = plain_layer(names, weights, states[:-1, sequence])
        assert_close(states[1:, sequence], want, atol=1e-4, rtol=1e-5)


def test_flax_layer(run_main):
    printed, _ = run_main("flax_layer.py")
    found = re.fullmatch(
        r"prefill of 20 tokens against 19 and one decode step: difference (\S+)\n", printed
    )
    assert found and float(found[1]) <= 1e-4, printed


def test_decode_loop(run_main):
    printed, _ = run_main("decode_loop.py")
    assert printed.startswith("Return a new list of "), printed
    assert 25 < len(printed) < 300 and "<|" not in printed, printed
