"""What the decode kernels are given: the call that is lowered for a GPU, and what they refuse."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_hpc import _primitive, _registry
from jax_hpc.ops.decode_attention import decode_attention, decode_schedule, heuristics
from jax_hpc.ops.decode_attention.heuristics import Cut
from jax_hpc.types import FallbackWarning
from tests.support.attention_truth import BF16, E4M3
from tests.support.lowered import decode_loop_text

B, S, HQ, HKV, D, P, N, M = 3, 2, 12, 2, 64, 9, 16, 5


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def arguments(
    dtype: Any = BF16, q_dtype: Any = BF16, heads: int = HQ, dim: int = D, size: int = N
):
    pages = shape(P, HKV, size, dim, dtype=dtype)
    integers = shape(B, M, dtype=jnp.int32), shape(B, dtype=jnp.int32)
    return [shape(B, S, heads, dim, dtype=q_dtype), pages, pages, *integers]


def lower(call: Any, args: Any, **arrays: Any) -> str:
    """The custom calls of a program for a GPU, compiled on any machine."""
    traced = jax.jit(call).trace(*args, **arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return "\n".join(line for line in text.splitlines() if "custom_call @jax_hpc" in line)


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "unusable_reason", lambda: None)
    monkeypatch.setattr(heuristics, "num_sms", lambda: 132)


def attributes(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+) = (true|false|-?[\d.e+-]+)(?: : \w+)?", text))


def test_auto_takes_the_kernel_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silently: warnings are errors here."""
    monkeypatch.setattr(_primitive, "_WARNED", set())
    call = functools.partial(decode_attention, implementation="auto")
    assert "@jax_hpc.decode_attention.v1" in lower(call, arguments())
    with pytest.warns(FallbackWarning, match="decode_attention runs on its XLA form.*got 256"):
        assert lower(call, arguments(dim=256)) == ""


def test_call_with_everything() -> None:
    def call(q: Any, k: Any, v: Any, table: Any, lens: Any, **arrays: Any) -> Any:
        sizes: dict[str, Any] = {"num_q_heads": HQ, "num_kv_heads": HKV, "head_dim": D, "q_len": S}
        schedule = decode_schedule(
            lens, **sizes, kv_dtype=E4M3, page_size=N, window=70, num_ctas=7
        )
        options: dict[str, Any] = {"window": 70, "logit_cap": 30.0, "scale": 0.25}
        options |= {"return_lse": True, "implementation": "cuda"}
        return decode_attention(q, k, v, table, lens, schedule, **options, **arrays)

    scales = {"q_scale": shape(B, S, HQ), "k_scale": shape(P, HKV, N), "v_scale": shape(HKV)}
    schedule, attention = lower(
        call, arguments(E4M3, E4M3), sinks=shape(HQ), **scales
    ).splitlines()
    assert (
        "@jax_hpc.decode_schedule.v1" in schedule and "@jax_hpc.decode_attention.v1" in attention
    )
    given = attributes(schedule)
    assert (given["num_kv_heads"], given["q_len"], given["window"]) == ("2", "2", "70")
    given = attributes(attention)
    assert given["num_ctas"] == "7" and given["num_splits"] == "0" and given["window"] == "70"
    assert float(given["scale"]) == 0.25 and float(given["logit_cap"]) == 30
    flags = ("schedule", "sinks", "q_scale", "k_scale", "v_scale")
    assert all(given[f"has_{flag}"] == "true" for flag in flags)
    assert given["return_lse"] == "true" and given["pdl"] == "true"
    results = attention.split("->")[1]
    # Output, log-sum-exp, and two slots a CTA of S * G rows.
    assert (
        "tensor<3x2x12x64xbf16>, tensor<3x2x12xf32>, tensor<14x12x64xf32>, tensor<14x12x2xf32>)"
        in (results)
    )


@pytest.mark.parametrize(
    ("num_splits", "cut", "workspaces"),
    [
        (None, Cut(132, 0, 0), ["264x12x64xf32", "264x12x2xf32", "133xi32", "133xi32", "132xi32"]),
        ("static", Cut(0, 16, 8), ["96x12x64xf32", "96x12x2xf32"]),
        (5, Cut(0, 5, 1), ["30x12x64xf32", "30x12x2xf32"]),
    ],
)
def test_cut_of_a_call_without_a_schedule(num_splits: Any, cut: Cut, workspaces: Any) -> None:
    call = functools.partial(decode_attention, num_splits=num_splits, implementation="cuda")
    text = lower(call, arguments())
    given = attributes(text)
    assert given["has_schedule"] == "false"
    assert int(given["num_ctas"]) == cut.num_ctas
    assert int(given["num_splits"]) == cut.splits
    assert int(given["min_split_tiles"]) == cut.min_split_tiles
    assert re.findall(r"tensor<(\w+)>", text.split("->")[1])[1:] == workspaces


def test_static_splits_follow_the_batch() -> None:
    few = heuristics.choose_cut(batch=32, num_splits="static", scheduled_ctas=None)
    many = heuristics.choose_cut(batch=33, num_splits="static", scheduled_ctas=None)
    assert few == Cut(0, 16, 512 // 64) and many == Cut(0, 4, 4096 // 64)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (arguments(jnp.float32), "the cache must be bfloat16 or float8_e4m3fn, got float32"),
        (arguments(q_dtype=jnp.float32), "q must be bfloat16 or float8_e4m3fn, got float32"),
        (arguments(dim=256), "D must be one of (64, 128), got 256"),
        (arguments(size=24), "N must be one of (16, 32, 64, 128), got 24"),
        (arguments(heads=130), "S * Hq / Hkv must be at most 128, got 130"),
    ],
    ids=["cache", "query", "head", "page", "rows"],
)
def test_no_kernel_says_why(args: Any, words: str) -> None:
    call = functools.partial(decode_attention, implementation="cuda")
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        jax.eval_shape(call, *args)


def test_more_pieces_than_the_kernel_counts() -> None:
    call = functools.partial(decode_attention, num_splits=2**28, implementation="cuda")
    with pytest.raises(NotImplementedError, match="Hkv must be at most 1073741824"):
        jax.eval_shape(call, *arguments())


@pytest.mark.parametrize("cache_dtype", [BF16, E4M3], ids=["bf16", "fp8"])
def test_a_decode_step_makes_one_schedule_for_all_layers(cache_dtype: Any) -> None:
    """In the loop's body, once each: the schedule, and an attention on it for every layer."""
    layers = 3
    text = decode_loop_text(cache_dtype, layers)
    calls = re.findall(r"(%\S+) = stablehlo\.custom_call @jax_hpc\.(\w+)\.v1\((.*?)\)(.*)", text)
    schedules = [call for call in calls if call[1] == "decode_schedule"]
    attentions = [call for call in calls if call[1] == "decode_attention"]
    assert (len(schedules), len(attentions)) == (1, layers)
    spans = [f"{schedules[0][0].partition(':')[0]}#{i}" for i in range(3)]
    for _, _, operands, rest in attentions:
        given = attributes(rest)
        assert given["has_schedule"] == "true" and given["num_ctas"] == "132"
        assert operands.split(", ")[5:8] == spans
