"""The rms_norm kernel on a GPU: float64, every width's cut, bad rows, in place, graphs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import fp8, rms_norm
from jax_hpc.ops.rms_norm.cases import CASES
from tests.support.driver_calls import driver_calls
from tests.support.norm_truth import assert_normalised, operands
from tests.support.numerics import assert_bitwise, assert_close

pytestmark = pytest.mark.gpu

BF16 = jnp.bfloat16
# On both sides of a warp's width and of each number of groups that a warp takes.
HIDDEN = (8, 248, 256, 264, 1000, 2048, 2880, 4096, 5120, 6144, 7168, 8192, 8200, 16384)

cuda = functools.partial(rms_norm, implementation="cuda")


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_widths(rng: np.random.Generator, hidden: int) -> None:
    for tokens, weight_dtype, is_added, scale in (
        (1, BF16, True, None),
        (7, jnp.float32, False, 0.01),
        (7, BF16, False, None),
        (300, jnp.float32, True, 0.01),
    ):
        x, weight, residual = operands(rng, tokens, hidden, BF16, weight_dtype)
        added = residual if is_added else None
        options = {"residual": added, "eps": 1e-5, "out_scale": scale}
        got = cuda(x, weight, **options)
        assert_normalised(got, x, weight, added, eps=1e-5, out_scale=scale)
        assert_same(cuda(x, weight, **options), got)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("tokens", [64, 265, 8192])
def test_models(rng: np.random.Generator, case: Any, tokens: int) -> None:
    """Of few rows and of many; a row's bits do not depend on how many there are."""
    x, weight, residual = operands(rng, tokens, case.hidden, BF16)
    got = cuda(x, weight, residual=residual, eps=case.eps)
    assert_normalised(got, x, weight, residual, eps=case.eps)
    few = cuda(x[-3:], weight, residual=residual[-3:], eps=case.eps)
    assert_same(few, jax.tree.map(lambda a: a[-3:], got))


def test_is_what_the_xla_form_gives(rng: np.random.Generator) -> None:
    x, weight, residual = operands(rng, 100, 2048, BF16)
    got = cuda(x, weight, residual=residual)
    want = rms_norm(x, weight, residual=residual, implementation="xla")
    assert_bitwise(got.residual, want.residual)
    assert_close(got.y, want.y, rtol=2.0**-7)
    assert np.mean(np.asarray(got.y) == np.asarray(want.y)) > 0.99


def test_fp8_is_the_norm_quantised_afterwards(rng: np.random.Generator) -> None:
    x, weight, residual = operands(rng, 40, 4096, BF16)
    for scale in (0.02, 1e-4, 3.0):
        got = cuda(x, weight, residual=residual, out_scale=scale)
        plain = cuda(x, weight, residual=residual)
        assert_bitwise(got.y, fp8.quantize(plain.y, jnp.float32(scale)))


@pytest.mark.parametrize("hidden", [264, 4096])
def test_bad_rows_change_no_other(rng: np.random.Generator, hidden: int) -> None:
    x, weight, residual = operands(rng, 9, hidden, BF16)
    kept = np.array([0, 1, 2, 3, 7, 8])
    bad = x.at[4, 3].set(jnp.nan).at[5, hidden - 1].set(-jnp.inf).at[6].set(3e38)
    for scale in (None, 0.01):
        clean = cuda(x, weight, residual=residual, out_scale=scale)
        got = cuda(bad, weight, residual=residual, out_scale=scale)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(clean), strict=True):
            assert_bitwise(a[kept], b[kept])
        rows = np.asarray(got.y).astype(np.float32)
        assert np.isnan(rows[4]).all()
        assert np.isnan(rows[5, -1]) and not rows[5, :-1].any()
        assert not rows[6].any(), "squares beyond float32"


def test_a_donated_residual_is_written_in_place(rng: np.random.Generator) -> None:
    x, weight, residual = operands(rng, 64, 2048, BF16)
    want = cuda(x, weight, residual=residual)
    run = jax.jit(lambda x, h: cuda(x, weight, residual=h), donate_argnums=1)
    jax.block_until_ready(run(x, jnp.copy(residual)))
    h = jax.block_until_ready(jnp.copy(residual))
    with driver_calls() as calls:
        got = jax.block_until_ready(run(x, h))
    assert (calls.launches, calls.ours, calls.moves) == (1, 1, []), f"{calls}"
    assert h.is_deleted()
    assert_same(got, want)
    # One that is read afterwards is not.
    both = jax.jit(lambda x, h: (cuda(x, weight, residual=h), h + 0))(x, residual)
    assert_same(both, (want, residual))
    assert_same(cuda(residual, weight, residual=residual).residual, residual + residual)


def test_in_a_loop_of_graphs(rng: np.random.Generator) -> None:
    x, weight, residual = operands(rng, 8, 2048, BF16)

    def step(index: jax.Array, carry: Any) -> Any:
        del index
        for _ in range(6):
            carry = cuda(carry[0], weight, residual=carry[1])
        return carry

    start = cuda(x, weight, residual=residual)
    looped = jax.jit(lambda carry: jax.lax.fori_loop(0, 4, step, carry))
    want = start
    for index in range(4):
        want = step(jnp.int32(index), want)
    for _ in range(3):
        assert_same(looped(start), want)
