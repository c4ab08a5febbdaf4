"""The prologue's kernel on a GPU: float64, untouched pages, the fp8 rule, launches, no copies."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import fp8, profiling
from jax_hpc.ops.qk_norm_rope_append import PrologueOut, qk_norm_rope_append
from jax_hpc.rope import rope_table
from tests.support import prologue_truth
from tests.support.driver_calls import driver_calls
from tests.support.numerics import assert_bitwise, assert_close

pytestmark = pytest.mark.gpu

BF16, F32 = jnp.bfloat16, jnp.float32
POSITIONS, PAGES = 300, 40


@dataclasses.dataclass(frozen=True)
class Setup:
    """One call. Scales: a number of axes, or "token" for K scales that are computed."""

    q_heads: int = 8
    kv_heads: int = 1
    head_dim: int = 128
    rotary: int = 128
    page: int = 64
    norm: str | None = "before"
    style: str = "half"
    weights: tuple[Any, Any] = (BF16, BF16)
    k_cache: Any = BF16
    v_cache: Any = BF16
    k_scale: Any = None
    v_scale: int | None = None
    quantize_q: bool = False
    eps: float = 1e-6


FP8 = functools.partial(Setup, k_cache=fp8.E4M3, v_cache=fp8.E4M3, quantize_q=True)
SETUPS = {
    "tp8": Setup(),
    "tp1": Setup(64, 8, eps=1e-5, weights=(F32, F32)),
    "head-64": Setup(14, 2, 64, 64, 16),
    "head-256": Setup(5, 3, 256, 256, 32, weights=(F32, BF16)),
    "after": Setup(3, 2, norm="after", eps=0.1),
    "no-norm-interleaved": Setup(6, 1, norm=None, weights=(None, None), style="interleaved"),
    "interleaved-head-64": Setup(9, 4, 64, 64, 100, style="interleaved", weights=(None, F32)),
    "partial": Setup(12, 1, rotary=32, weights=(None, None)),
    "partial-interleaved": Setup(12, 1, 256, 48, style="interleaved"),
    "width-of-no-vector": Setup(4, 2, 64, 20, 24),
    "width-of-no-vector-interleaved": Setup(4, 2, 128, 126, 1, "after", "interleaved"),
    "fp8-tensor": FP8(k_scale=0, v_scale=0),
    "fp8-head": FP8(16, 4, 64, 64, k_scale=1, v_scale=1, style="interleaved"),
    "fp8-token": FP8(64, 8, k_scale="token", v_scale=1),
    "fp8-token-256": FP8(4, 2, 256, 64, 16, "after", k_scale="token"),
    "fp8-unscaled": FP8(7, 1, 64, 32, quantize_q=False),
    "fp8-q": Setup(12, 2, quantize_q=True, rotary=6),
    "two-caches": Setup(12, 2, v_cache=fp8.E4M3, v_scale=0),
}


def draw(setup: Setup, rng: np.random.Generator, tokens: int) -> dict[str, Any]:
    """Operands of one call. Caches hold garbage, so that stray writes show."""
    heads = setup.q_heads + 2 * setup.kv_heads
    pool = (PAGES + tokens // setup.page, setup.kv_heads, setup.page, setup.head_dim)
    num_slots = pool[0] * setup.page
    slots = rng.permutation(max(num_slots, tokens))[:tokens].astype(np.int32)
    slots[slots >= num_slots] = -1
    slots[::7] = rng.choice([-1, -9, num_slots, 2**31 - 1], len(slots[::7]))
    scales: dict[str, Any] = {}
    for name, axes in (("k_scale", setup.k_scale), ("v_scale", setup.v_scale)):
        if axes == "token":
            scales["k_scale_pages"] = jnp.asarray(rng.uniform(1, 2, pool[:3]), F32)
        elif axes is not None:
            scales[name] = jnp.asarray(rng.uniform(0.01, 0.05, (setup.kv_heads,) * axes), F32)
    weights = [
        None if dtype is None else jnp.asarray(rng.uniform(-1, 2, setup.head_dim), dtype)
        for dtype in setup.weights
    ]
    return {
        "qkv": jnp.asarray(rng.normal(0, 2, (tokens, heads * setup.head_dim)), BF16),
        "q_norm": weights[0],
        "k_norm": weights[1],
        "cos_sin": jnp.asarray(rope_table(POSITIONS, setup.rotary, 1e4)),
        "positions": jnp.asarray(rng.integers(-4, POSITIONS + 4, tokens), jnp.int32),
        "slots": jnp.asarray(slots),
        "k_pages": jnp.asarray(rng.normal(0, 1, pool), setup.k_cache),
        "v_pages": jnp.asarray(rng.normal(0, 1, pool), setup.v_cache),
        **scales,
    }


@functools.cache
def jitted(setup: Setup, implementation: Any = "cuda") -> Any:
    return jax.jit(
        functools.partial(
            qk_norm_rope_append,
            eps=setup.eps,
            norm=setup.norm,
            rope_style=setup.style,
            quantize_q=setup.quantize_q,
            implementation=implementation,
        )
    )


def assert_stored(got: Any, values: np.ndarray, scale: Any, args: Any, pages: str | None) -> None:
    """Within one rounding of float64; of a cache also that nothing else was touched."""
    scaled = values / np.asarray(scale, np.float64)
    if np.dtype(got.dtype) == prologue_truth.E4M3:
        scaled = np.clip(scaled, -448, 448)
    bound = 0.51 * prologue_truth.spacing(scaled, got.dtype) + 4e-6 * np.abs(scaled)
    # A rotation's two terms may cancel.
    bound += 2e-6 * np.abs(scaled).max(axis=-1, keepdims=True)
    if pages is not None:
        slots, before = np.asarray(args["slots"]), args[pages]
        scaled = prologue_truth.append(before, slots, scaled)
        bound = prologue_truth.append(np.zeros(scaled.shape), slots, bound)
    assert_close(got, scaled, atol=bound)


def check(setup: Setup, args: dict[str, Any], got: PrologueOut) -> None:
    host = {k: None if v is None else np.asarray(v).astype(np.float64) for k, v in args.items()}
    want = prologue_truth.prologue(
        np.asarray(host["qkv"]),
        host["q_norm"],
        host["k_norm"],
        np.asarray(host["cos_sin"]),
        np.asarray(args["positions"]),
        setup.kv_heads,
        setup.head_dim,
        eps=setup.eps,
        norm=setup.norm,
        rope_style=setup.style,
    )
    q_scale = np.ones(1)
    if setup.quantize_q:
        q_scale = np.abs(want.q).max(axis=2, keepdims=True) / 448
        assert_close(got.q_scale, q_scale[..., 0], rtol=1e-5)
    assert_stored(got.q, want.q, q_scale, args, None)
    scales = {name: np.asarray(host.get(f"{name}_scale", 1.0)) for name in ("k", "v")}
    scales = {name: scale[:, None] if scale.ndim else scale for name, scale in scales.items()}
    if setup.k_scale == "token":
        scales["k"] = np.abs(want.k).max(axis=2, keepdims=True) / 448
        slots, values = np.asarray(args["slots"]), scales["k"][..., 0]
        pages = prologue_truth.append(args["k_scale_pages"], slots, values)
        assert_close(got.k_scale_pages, pages, rtol=1e-5)
    assert_stored(got.k_pages, want.k, scales["k"], args, "k_pages")
    assert_stored(got.v_pages, want.v, scales["v"], args, "v_pages")


def assert_same(got: PrologueOut, want: PrologueOut) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("name", SETUPS)
def test_against_float64(name: str, tokens: int, rng: np.random.Generator) -> None:
    setup = SETUPS[name]
    args = draw(setup, rng, tokens)
    got = jitted(setup)(**args)
    check(setup, args, got)
    assert_same(jitted(setup)(**args), got)


@pytest.mark.parametrize("name", ["tp8", "tp1", "fp8-token"])
def test_bits_do_not_depend_on_the_batch(name: str, rng: np.random.Generator) -> None:
    """Many tokens are cut otherwise than one: each gives the bits that it gives alone."""
    setup = SETUPS[name]
    args = draw(setup, rng, 5000)
    got = jitted(setup)(**args)
    for token in (0, 1, 2499, 4999):
        one = {key: args[key][token : token + 1] for key in ("qkv", "positions", "slots")}
        alone = jitted(setup)(**{**args, **one})
        assert_bitwise(alone.q[0], got.q[token])
        slot = int(one["slots"][0])
        if 0 <= slot < args["k_pages"].shape[0] * setup.page:
            at = (slot // setup.page, slice(None), slot % setup.page)
            assert_bitwise(alone.k_pages[at], got.k_pages[at])
            assert_bitwise(alone.v_pages[at], got.v_pages[at])


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-head", "fp8-token", "fp8-unscaled"])
def test_quantised_as_the_library_does(name: str, rng: np.random.Generator) -> None:
    """Without norm and rotation nothing rounds ahead of the rule: the bits are those of fp8.py."""
    setup = dataclasses.replace(SETUPS[name], norm=None, weights=(None, None), rotary=16)
    args = draw(setup, rng, 200)
    table = np.concatenate([np.ones((POSITIONS, 8)), np.zeros((POSITIONS, 8))], axis=1)
    args["cos_sin"] = jnp.asarray(table, F32)
    args["qkv"] = args["qkv"].at[3].set(0).at[4].multiply(1e4).at[5].multiply(1e-6)
    assert_same(jitted(setup)(**args), jitted(setup, "xla")(**args))


def test_a_row_of_nan_stays_in_its_row(rng: np.random.Generator) -> None:
    setup = SETUPS["fp8-token"]
    args = draw(setup, rng, 9)
    clean = jitted(setup)(**args)
    dirty = jitted(setup)(**{**args, "qkv": args["qkv"].at[7].set(jnp.nan)})  # it is not written
    keep = np.arange(9) != 7
    assert np.all(np.isnan(np.asarray(dirty.q_scale)[7]))
    for field, rows in (("q", keep), ("q_scale", keep), *((f, ...) for f in clean._fields[2:])):
        assert_bitwise(
            np.asarray(getattr(dirty, field))[rows], np.asarray(getattr(clean, field))[rows]
        )


def append_loop(setup: Setup, steps: int) -> Any:
    """A decode-like loop: every step writes its tokens into the carried caches."""
    call = jitted(setup)

    def run(caches: Any, tokens: Any, fixed: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            caches, q = carry
            # The next step's tokens depend on this one's queries: no call leaves the loop.
            step = {**tokens, "qkv": tokens["qkv"] + q.astype(BF16).sum() * 0}
            out = call(**step, **fixed, **caches)
            return {name: getattr(out, name) for name in caches}, out.q

        q = jnp.zeros((len(tokens["slots"]), setup.q_heads, setup.head_dim), BF16)
        q = q.astype(fp8.E4M3) if setup.quantize_q else q
        return jax.lax.fori_loop(0, steps, body, (caches, q))

    return jax.jit(run, donate_argnums=0)


@pytest.mark.parametrize("name", ["tp8", "fp8-token"])
def test_caches_are_written_in_place_by_one_launch(name: str, rng: np.random.Generator) -> None:
    setup = SETUPS[name]
    args = draw(setup, rng, 8)
    names = [key for key in ("k_pages", "v_pages", "k_scale_pages") if key in args]
    caches = {key: args.pop(key) for key in names}
    tokens = {key: args.pop(key) for key in ("qkv", "positions", "slots")}
    want = jitted(setup)(**tokens, **args, **caches)

    compiled = append_loop(setup, 4).lower(caches, tokens, args).compile()
    assert profiling.cache_copies(compiled, list(caches.values())) == []
    assert profiling.host_transfers(compiled) == []
    assert len(re.findall("custom_call_target=.jax_hpc", compiled.as_text())) == 1
    looped, q = compiled(jax.tree.map(jnp.copy, caches), tokens, args)
    assert_bitwise(q, want.q)
    for key, value in looped.items():
        assert_bitwise(value, getattr(want, key))

    once = jax.jit(
        lambda caches, tokens, args: jitted(setup)(**caches, **tokens, **args), donate_argnums=0
    )
    jax.block_until_ready(once(jax.tree.map(jnp.copy, caches), tokens, args))
    given = jax.block_until_ready(jax.tree.map(jnp.copy, caches))
    places = {key: value.unsafe_buffer_pointer() for key, value in given.items()}
    with driver_calls() as calls:
        out = jax.block_until_ready(once(given, tokens, args))
    assert (calls.launches, calls.ours, calls.moves) == (1, 1, []), f"{calls}"
    assert {getattr(out, key).unsafe_buffer_pointer() for key in places} == set(places.values())
