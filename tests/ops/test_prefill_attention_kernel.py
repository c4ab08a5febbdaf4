"""What the prefill kernel is given: the call that is lowered for a GPU, and what it refuses."""

import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_hpc import _primitive, _registry
from jax_hpc.ops.prefill_attention import heuristics, prefill_attention
from jax_hpc.types import FallbackWarning
from tests.support.attention_truth import BF16, E4M3

T, B, HQ, HKV, D, P, N, M = 37, 3, 12, 2, 64, 9, 16, 5


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def arguments(
    dtype: Any = BF16, q_dtype: Any = BF16, heads: int = HQ, dim: int = D, size: int = N
) -> list[Any]:
    pages, lens = shape(P, HKV, size, dim, dtype=dtype), shape(B, dtype=jnp.int32)
    table = shape(B, M, dtype=jnp.int32)
    return [shape(T, heads, dim, dtype=q_dtype), pages, pages, table, lens, lens, lens]


def lower(call: Any, args: Any, **arrays: Any) -> str:
    """The custom calls of a program for a GPU, compiled on any machine."""
    traced = jax.jit(call).trace(*args, **arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return "\n".join(line for line in text.splitlines() if "custom_call @jax_hpc" in line)


def attributes(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+) = (true|false|-?[\d.e+-]+)(?: : \w+)?", text))


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "unusable_reason", lambda: None)


@pytest.mark.parametrize("implementation", ["auto", "cuda", "xla"])
def test_who_takes_the_kernel(implementation: Any) -> None:
    call = functools.partial(prefill_attention, max_q_len=8, implementation=implementation)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        text = lower(call, arguments())
    assert ("@jax_hpc.prefill_attention.v1" in text) == (implementation != "xla")


def test_auto_says_what_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_primitive, "_WARNED", set())
    with pytest.warns(FallbackWarning, match="D must be one of"):
        assert lower(functools.partial(prefill_attention, max_q_len=8), arguments(dim=256)) == ""


def test_call_on_an_fp8_cache() -> None:
    scales = {"q_scale": shape(T, HQ), "k_scale": shape(P, HKV, N), "v_scale": shape(HKV)}
    call = functools.partial(prefill_attention, max_q_len=20, implementation="cuda")
    given = attributes(lower(call, arguments(E4M3, E4M3), **scales))
    assert all(given[f"has_{name}"] == "true" for name in scales)
    given = attributes(lower(call, arguments(E4M3)))
    assert all(given[f"has_{name}"] == "false" for name in scales)


@pytest.mark.parametrize("everything", [True, False])
def test_call(everything: bool) -> None:
    options: dict[str, Any] = {"max_q_len": 20, "implementation": "cuda"}
    if everything:
        options |= {"window": 70, "logit_cap": 30.0, "scale": 0.25, "return_lse": True}
    call = functools.partial(prefill_attention, **options)
    text = lower(call, arguments(), **({"sinks": shape(HQ)} if everything else {}))
    assert "@jax_hpc.prefill_attention.v1" in text
    given = attributes(text)
    assert (given["max_q_len"], given["pdl"]) == ("20", "true")
    assert given["window"] == ("70" if everything else "0")
    assert float(given["scale"]) == (0.25 if everything else D**-0.5)
    assert float(given["logit_cap"]) == (30 if everything else 0)
    assert given["has_sinks"] == given["return_lse"] == ("true" if everything else "false")
    results = re.findall(r"tensor<(\w+)>", text.split("->")[1])
    # The plan: a header and at most 37 * 6 // 128 + 3 tiles of rows, eight words each.
    want = ["37x12x64xbf16", *(["37x12xf32"] if everything else []), "40xi32"]
    assert results == want


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        (arguments(jnp.float32), {}, "the cache must be bfloat16 or float8_e4m3fn, got float32"),
        (arguments(q_dtype=jnp.float32), {}, "q must be bfloat16 or float8_e4m3fn, got float32"),
        (arguments(dim=256), {}, "D must be one of (64, 128), got 256"),
        (arguments(size=24), {}, "N must be one of (16, 32, 64, 128), got 24"),
        (arguments(heads=258), {}, "Hq / Hkv must be at most 128, got 129"),
        (arguments(), {"scale": -1.0}, "scale must be above 0, got -1.0"),
    ],
    ids=["cache", "query", "head", "page", "group", "scale"],
)
def test_no_kernel_says_why(args: Any, options: Any, words: str) -> None:
    call = functools.partial(prefill_attention, max_q_len=8, implementation="cuda", **options)
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        jax.eval_shape(call, *args)


@pytest.mark.parametrize("group", [1, 5, 8, 128])
def test_plan_has_room_for_any_lengths(group: int) -> None:
    """Chunks as short and as many as they come."""
    for lens in ([1] * 50, [129, 1, 0, 127, 300], [2000]):
        tiles = sum(-(-n * group // 128) for n in lens)
        ints = heuristics.plan_ints(tokens=sum(lens), batch=len(lens), group=group)
        assert ints >= 8 * (1 + tiles)
