"""rms_norm against float64, its edges and errors, and the call that is lowered for a GPU."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import _registry, fp8
from jax_hpc.ops.rms_norm import NormOut, rms_norm
from tests.support.lowered import decode_loop_text
from tests.support.norm_truth import assert_normalised, operands
from tests.support.numerics import assert_bitwise, assert_close

BF16 = jnp.bfloat16


def shape(*sizes: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
def test_against_float64(rng: np.random.Generator, dtype: Any, with_residual: bool) -> None:
    x, weight, residual = operands(rng, 9, 200, dtype)
    residual = residual if with_residual else None
    got = jax.jit(functools.partial(rms_norm, eps=1e-5))(x, weight, residual=residual)
    assert got.y.dtype == dtype
    assert_normalised(got, x, weight, residual, eps=1e-5)


def test_is_what_a_model_computes(rng: np.random.Generator) -> None:
    """The sum, rounded; then the norm of that. To the bit, where nothing is fused."""
    x, weight, residual = operands(rng, 4, 64, BF16)
    with jax.disable_jit():
        h = x + residual
        wide = h.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + jnp.float32(1e-6))
        y = (wide * scale * weight.astype(jnp.float32)).astype(BF16)
    got = rms_norm(x, weight, residual=residual)
    assert_bitwise(got.residual, h)
    assert_close(got.y, y, rtol=2.0**-7)
    assert np.mean(np.asarray(got.y) == np.asarray(y)) > 0.99


@pytest.mark.parametrize("scale", [0.02, jnp.float32(0.02)], ids=["number", "array"])
def test_fp8_is_the_norm_quantised_afterwards(rng: np.random.Generator, scale: Any) -> None:
    x, weight, residual = operands(rng, 5, 96, BF16)
    plain = rms_norm(x, weight, residual=residual)
    got = rms_norm(x, weight, residual=residual, out_scale=scale)
    assert_bitwise(got.y, fp8.quantize(plain.y, jnp.float32(0.02)))
    assert_bitwise(got.residual, plain.residual)
    large = np.abs(np.asarray(plain.y, np.float32)) > 0.1
    saturated = rms_norm(x, weight, residual=residual, out_scale=1e-4).y
    assert np.all(np.abs(np.asarray(saturated, np.float32))[large] == 448.0)


def test_a_bad_row_changes_no_other(rng: np.random.Generator) -> None:
    x, weight, residual = operands(rng, 5, 64, jnp.float32)
    clean = rms_norm(x, weight, residual=residual)
    bad = x.at[1, 3].set(jnp.nan).at[2, 5].set(jnp.inf)
    got = rms_norm(bad, weight, residual=residual)
    for a, b in zip(got, clean, strict=True):
        assert_bitwise(a[jnp.array([0, 3, 4])], b[jnp.array([0, 3, 4])])
    assert bool(jnp.all(jnp.isnan(got.y[1])))
    assert bool(jnp.isnan(got.y[2, 5])) and float(jnp.sum(jnp.abs(got.y[2, 6:]))) == 0
    zeros = rms_norm(jnp.zeros((2, 8)), weight[:8], eps=0.0)
    assert bool(jnp.all(jnp.isnan(zeros.y))), "0 / 0 with no eps"


def test_vmap_folds_rows_and_refuses_weights(rng: np.random.Generator) -> None:
    x, weight, residual = operands(rng, 6, 32, jnp.float32)
    whole = rms_norm(x, weight, residual=residual)
    x, rest = x.reshape(3, 2, 32), residual.reshape(3, 2, 32)
    both = jax.vmap(lambda a, b: rms_norm(a, weight, residual=b))(x, rest)
    one = jax.vmap(lambda a: rms_norm(a, weight, residual=rest[0]))(x)
    for got, want in zip(both, whole, strict=True):
        assert_close(got.reshape(6, 32), want, rtol=1e-6)
    assert_close(one.y[0], whole.y[:2], rtol=1e-6)
    weights = jnp.stack([weight] * 3)
    with pytest.raises(NotImplementedError, match="vmap over argument 'weight'"):
        jax.vmap(rms_norm)(x, weights)


def test_shapes_and_empty_batches() -> None:
    call = functools.partial(jax.eval_shape, rms_norm)
    got = call(shape(7, 16), shape(16), residual=shape(7, 16))
    assert got == NormOut(shape(7, 16), shape(7, 16))
    assert call(shape(7, 16, dtype=jnp.float32), shape(16)).residual is None
    scaled = call(shape(7, 16), shape(16), out_scale=shape(dtype=jnp.float32))
    assert scaled.y == shape(7, 16, dtype=fp8.E4M3)
    assert rms_norm(jnp.zeros((0, 16)), jnp.zeros(16)).y.shape == (0, 16)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": shape(4)}, ValueError, "argument 'x' must have shape [T, H], got (4,)"),
        ({"x": shape(4, 0)}, ValueError, "argument 'x' must be of H >= 1"),
        ({"weight": shape(8)}, ValueError, "argument 'weight' must have shape [H] with H = 16"),
        ({"residual": shape(3, 16)}, ValueError, "argument 'residual' must have shape [T, H]"),
        ({"out_scale": shape(1)}, ValueError, "argument 'out_scale' must have shape []"),
        ({"x": shape(4, 16, dtype=jnp.float16)}, TypeError, "'x' must be bfloat16 or float32"),
        ({"weight": shape(16, dtype=fp8.E4M3)}, TypeError, "'weight' must be bfloat16 or float32"),
        (
            {"residual": shape(4, 16, dtype=jnp.float32)},
            TypeError,
            "must be bfloat16, got float32",
        ),
        ({"out_scale": shape()}, TypeError, "'out_scale' must be float32, got bfloat16"),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"x": shape(4, 16), "weight": shape(16), **change}
    with pytest.raises(error, match="rms_norm: .*" + re.escape(words)):
        jax.eval_shape(rms_norm, **arguments)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_positive(scale: float) -> None:
    with pytest.raises(ValueError, match="rms_norm: argument 'out_scale' must be finite and > 0"):
        rms_norm(jnp.ones((1, 8)), jnp.ones(8), out_scale=scale)


@pytest.mark.parametrize(
    ("eps", "error"), [(-1.0, ValueError), (float("nan"), ValueError), (jnp.ones(()), TypeError)]
)
def test_eps_is_a_number(eps: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="rms_norm: argument 'eps' must be"):
        rms_norm(jnp.ones((1, 8)), jnp.ones(8), eps=eps)


# What the kernel is given.


def lower(*arguments: Any, **options: Any) -> str:
    """The custom calls of a program for a GPU, lowered on any machine."""
    arrays = {k: v for k, v in options.items() if k in ("residual", "out_scale")}
    call = functools.partial(rms_norm, **{k: v for k, v in options.items() if k not in arrays})
    text = jax.jit(call).trace(*arguments, **arrays).lower(lowering_platforms=("cuda",)).as_text()
    return "\n".join(line for line in text.splitlines() if "custom_call @jax_hpc" in line)


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "unusable_reason", lambda: None)


def types(text: str) -> list[str]:
    return re.findall(r"tensor<(\w+)>", text)


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_bare_call() -> None:
    for implementation, is_kernel in (("auto", True), ("cuda", True), ("xla", False)):
        text = lower(shape(3, 64), shape(64), eps=0.5, implementation=implementation)
        assert ("@jax_hpc.rms_norm.v1" in text) == is_kernel
        if not is_kernel:
            continue
        assert "eps = 5.000000e-01 : f32" in text
        assert "given = {out_scale = false, residual = false}" in text
        taken, given = text.split(" : (")[-1].split("->")
        assert (types(taken), types(given)) == (["3x64xbf16", "64xbf16"], ["3x64xbf16"])
        assert "operand_index" not in text


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_call_with_everything() -> None:
    text = lower(
        shape(3, 64),
        shape(64, dtype=jnp.float32),
        residual=shape(3, 64),
        out_scale=shape(dtype=jnp.float32),
        implementation="cuda",
    )
    assert "given = {out_scale = true, residual = true}" in text
    taken, given = text.split(" : (")[-1].split("->")
    assert types(taken) == ["3x64xbf16", "64xf32", "3x64xbf16", "f32"]
    assert types(given) == ["3x64xf8E4M3FN", "3x64xbf16"]
    # The sum takes the residual's memory.
    pairs = re.findall(r"output_tuple_indices = \[(\d+)\],\s*operand_index = (\d+)", text)
    assert pairs == [("1", "2")]


@pytest.mark.usefixtures("as_if_on_a_gpu")
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (shape(2, 64, dtype=jnp.float32), "x must be bfloat16, got float32"),
        (shape(2, 60), "H must be a multiple of 8 and at most 16384, got 60"),
        (shape(2, 16392), "H must be a multiple of 8 and at most 16384, got 16392"),
        (shape(2**31, 8), "T must be at most 2147483647"),
    ],
)
def test_no_kernel_says_why(x: Any, words: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^rms_norm: .*{words}"):
        jax.eval_shape(functools.partial(rms_norm, implementation="cuda"), x, shape(x.shape[1]))


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_a_decode_step_adds_and_normalises_in_two_launches_a_layer() -> None:
    layers = 2
    text = decode_loop_text(BF16, layers)
    calls = [line for line in text.splitlines() if "@jax_hpc.rms_norm" in line]
    with_residual = [call for call in calls if "residual = true" in call]
    # But for the embedding's rows, which nothing has been added to.
    assert (len(calls), len(with_residual)) == (2 * layers + 1, 2 * layers)
