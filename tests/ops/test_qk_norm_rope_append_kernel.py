"""What the prologue's kernel is given: the call that is lowered for a GPU, and what it refuses."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_hpc import _registry
from jax_hpc.fp8 import E4M3
from jax_hpc.ops.qk_norm_rope_append import qk_norm_rope_append
from tests.support.lowered import decode_loop_text

T, HQ, HKV, D, P, N, R, POSITIONS = 5, 4, 2, 64, 9, 16, 32, 100
CACHE = f"{P}x{HKV}x{N}x{D}"


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def arguments(cache: Any = jnp.bfloat16, **changes: Any) -> dict[str, Any]:
    pages = shape(P, HKV, N, D, dtype=cache)
    return {
        "qkv": shape(T, (HQ + 2 * HKV) * D, dtype=jnp.bfloat16),
        "q_norm": None,
        "k_norm": None,
        "cos_sin": shape(POSITIONS, R),
        "positions": shape(T, dtype=jnp.int32),
        "slots": shape(T, dtype=jnp.int32),
        "k_pages": pages,
        "v_pages": pages,
        **changes,
    }


def lower(args: dict[str, Any], **options: Any) -> str:
    """The custom calls of a program for a GPU, lowered on any machine."""
    call = functools.partial(qk_norm_rope_append, **options)
    text = jax.jit(call).trace(**args).lower(lowering_platforms=("cuda",)).as_text()
    return "\n".join(line for line in text.splitlines() if "custom_call @jax_hpc" in line)


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "unusable_reason", lambda: None)


def attributes(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+) = (true|false|-?[\d.e+-]+)(?: : \w+)?", text))


def operand_types(text: str) -> list[str]:
    return re.findall(r"tensor<(\w+)>", text.split(" : (")[-1].split("->")[0])


def result_types(text: str) -> list[str]:
    return re.findall(r"tensor<(\w+)>", text.split("->")[-1])


def written_in_place(text: str) -> dict[int, int]:
    """Result -> operand whose memory it takes."""
    found = re.findall(r"output_tuple_indices = \[(\d+)\],\s*operand_index = (\d+)", text)
    return {int(result): int(operand) for result, operand in found}


@pytest.mark.parametrize(
    ("implementation", "is_kernel"), [("auto", True), ("cuda", True), ("xla", False)]
)
def test_auto_takes_the_kernel(implementation: str, is_kernel: bool) -> None:
    text = lower(arguments(), implementation=implementation)
    assert ("qk_norm_rope_append.v1" in text) == is_kernel


def test_bare_call() -> None:
    text = lower(arguments(), norm=None, rope_style="interleaved", implementation="cuda")
    assert text.count("@jax_hpc.qk_norm_rope_append.v1") == 1
    given = attributes(text)
    assert (given["norm"], given["rope_style"]) == ("2", "1")
    flags = ("q_norm", "k_norm", "k_scale", "v_scale", "k_scale_pages")
    assert all(given[flag] == "false" for flag in flags)
    assert operand_types(text) == [
        *("5x512xbf16", "100x32xf32", "5xi32", "5xi32", f"{CACHE}xbf16", f"{CACHE}xbf16")
    ]
    assert result_types(text) == ["5x4x64xbf16", f"{CACHE}xbf16", f"{CACHE}xbf16"]
    assert written_in_place(text) == {1: 4, 2: 5}


def test_call_with_everything() -> None:
    args = arguments(
        E4M3,
        q_norm=shape(D, dtype=jnp.bfloat16),
        k_norm=shape(D),
        v_scale=shape(HKV),
        k_scale_pages=shape(P, HKV, N),
    )
    text = lower(args, norm="after", eps=0.25, quantize_q=True, implementation="cuda")
    given = attributes(text)
    assert float(given["eps"]) == 0.25
    assert (given["norm"], given["rope_style"], given["k_scale"]) == ("1", "0", "false")
    assert all(given[flag] == "true" for flag in ("q_norm", "k_norm", "v_scale", "k_scale_pages"))
    optional = ["64xbf16", "64xf32", "2xf32", f"{P}x{HKV}x{N}xf32"]
    assert operand_types(text)[6:] == optional
    assert result_types(text) == [
        *("5x4x64xf8E4M3FN", "5x4xf32", f"{CACHE}xf8E4M3FN", f"{CACHE}xf8E4M3FN"),
        f"{P}x{HKV}x{N}xf32",
    ]
    assert written_in_place(text) == {2: 4, 3: 5, 4: 9}


def test_static_scales() -> None:
    text = lower(arguments(E4M3, k_scale=shape(), v_scale=shape(HKV)), implementation="cuda")
    assert operand_types(text)[6:] == ["f32", "2xf32"]
    assert attributes(text)["k_scale"] == attributes(text)["v_scale"] == "true"


def test_caches_of_two_dtypes() -> None:
    args = arguments(v_pages=shape(P, HKV, N, D, dtype=E4M3))
    text = lower(args, implementation="cuda")
    assert result_types(text)[1:] == [f"{CACHE}xbf16", f"{CACHE}xf8E4M3FN"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qkv": shape(T, 512)}, "qkv must be bfloat16, got float32"),
        (
            {"k_pages": shape(P, HKV, N, D)},
            "k_pages must be bfloat16 or float8_e4m3fn, got float32",
        ),
        (
            {"v_pages": shape(P, HKV, N, D)},
            "v_pages must be bfloat16 or float8_e4m3fn, got float32",
        ),
        (
            {name: shape(P, HKV, N, 32, dtype=jnp.bfloat16) for name in ("k_pages", "v_pages")},
            "D must be one of (64, 128, 256), got 32",
        ),
        (
            {
                "qkv": shape(2**28, (HQ + 2 * HKV) * D, dtype=jnp.bfloat16),
                **{name: shape(2**28, dtype=jnp.int32) for name in ("positions", "slots")},
            },
            f"T (Hq + 2 Hkv) must be at most {2**31 - 2**10}, got {2**31}",
        ),
        (
            {
                "qkv": shape(T, (HQ + 2 * 4) * D, dtype=jnp.bfloat16),
                **{name: shape(2**26, 4, N, D, dtype=E4M3) for name in ("k_pages", "v_pages")},
            },
            f"P Hkv N must be below {2**32}, got {2**32}",
        ),
    ],
    ids=["qkv", "keys", "values", "head", "many-tokens", "large-cache"],
)
def test_no_kernel_says_why(change: dict[str, Any], words: str) -> None:
    call = functools.partial(qk_norm_rope_append, implementation="cuda")
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        jax.eval_shape(call, **arguments(**change))


@pytest.mark.parametrize("cache_dtype", [jnp.bfloat16, E4M3], ids=["bf16", "fp8"])
def test_a_decode_step_calls_it_once_a_layer(cache_dtype: Any) -> None:
    """Straight from the projection to pages written in place."""
    layers = 3
    text = decode_loop_text(cache_dtype, layers)
    calls = [line for line in text.splitlines() if "@jax_hpc.qk_norm_rope_append" in line]
    assert len(calls) == layers
    first_result = 2 if cache_dtype == E4M3 else 1  # after q, and q's scales
    for call in calls:
        assert written_in_place(call) == {first_result: 4, first_result + 1: 5}
