"""qk_norm_rope_append against float64, its cache writes, and what it must not touch or copy."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hpc import fp8
from jax_hpc.ops.qk_norm_rope_append import PrologueOut, qk_norm_rope_append
from jax_hpc.ops.qk_norm_rope_append.cases import CASES
from jax_hpc.rope import rope_table
from tests.support import prologue_truth
from tests.support.numerics import assert_bitwise, assert_close

PAGES, PAGE = 4, 16
POSITIONS = 50
# Three pages used, two tokens skipped (one below, one above the pool), positions out of range.
SLOTS = np.asarray([17, 3, -1, 60, PAGES * PAGE, 18], np.int32)
TOKEN_POSITIONS = np.asarray([0, 49, 7, 1000, -5, 31], np.int32)
TOKENS = len(SLOTS)


@dataclasses.dataclass(frozen=True)
class Setup:
    """One call: shapes, dtypes and options."""

    name: str
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotary: int = 16
    dtype: Any = jnp.float32
    cache: Any = jnp.float32
    weight: Any = jnp.float32
    k_scale: str | None = None  # "tensor", "head", "token"
    quantize_q: bool = False
    options: tuple[tuple[str, Any], ...] = ()


SETUPS = (
    Setup("float32"),
    Setup("bf16", dtype=jnp.bfloat16, cache=jnp.bfloat16, weight=jnp.bfloat16),
    Setup("after", options=(("norm", "after"), ("eps", 1e-2))),
    Setup(
        "no-norm-interleaved", weight=None, options=(("norm", None), ("rope_style", "interleaved"))
    ),
    Setup("unit-weight-partial", weight=None, rotary=6, kv_heads=1),
    Setup("partial-interleaved", rotary=8, q_heads=3, options=(("rope_style", "interleaved"),)),
    Setup("no-rotation", rotary=0, q_heads=1, kv_heads=1),
    Setup("fp8-tensor", dtype=jnp.bfloat16, cache=fp8.E4M3, k_scale="tensor", quantize_q=True),
    Setup("fp8-head", cache=fp8.E4M3, k_scale="head"),
    Setup("fp8-token", cache=fp8.E4M3, k_scale="token", quantize_q=True),
    Setup("fp8-unscaled", cache=fp8.E4M3, options=(("norm", "after"),)),
    *(
        Setup(
            case.name,
            case.q_heads,
            case.kv_heads,
            case.head_dim,
            case.head_dim,
            jnp.bfloat16,
            jnp.bfloat16,
            jnp.bfloat16,
            options=tuple(case.options.items()),
        )
        for case in CASES
        if case.name in ("qwen3-480b-tp8", "hy3-tp8")
    ),
)


def arguments(setup: Setup, rng: np.random.Generator) -> dict[str, Any]:
    """Operands of one call, with garbage in the cache so that stray writes show."""
    width = (setup.q_heads + 2 * setup.kv_heads) * setup.head_dim
    shape = (PAGES, setup.kv_heads, PAGE, setup.head_dim)
    weights = [
        None
        if setup.weight is None
        else jnp.asarray(rng.uniform(0.5, 2, setup.head_dim), setup.weight)
        for _ in range(2)
    ]
    scales: dict[str, Any] = {}
    if setup.k_scale == "tensor":
        scales = {"k_scale": jnp.float32(0.013), "v_scale": jnp.float32(0.02)}
    elif setup.k_scale == "head":
        heads = rng.uniform(0.01, 0.02, (2, setup.kv_heads)).astype(np.float32)
        scales = {"k_scale": jnp.asarray(heads[0]), "v_scale": jnp.asarray(heads[1])}
    elif setup.k_scale == "token":
        pages = rng.uniform(1, 2, shape[:3]).astype(np.float32)
        scales = {"k_scale_pages": jnp.asarray(pages), "v_scale": jnp.float32(0.5)}
    return {
        "qkv": jnp.asarray(rng.standard_normal((TOKENS, width)), setup.dtype),
        "q_norm": weights[0],
        "k_norm": weights[1],
        "cos_sin": jnp.asarray(rope_table(POSITIONS, setup.rotary, 1e4)),
        "positions": jnp.asarray(TOKEN_POSITIONS),
        "slots": jnp.asarray(SLOTS),
        "k_pages": jnp.asarray(rng.standard_normal(shape), setup.cache),
        "v_pages": jnp.asarray(rng.standard_normal(shape), setup.cache),
        **scales,
    }


def call(setup: Setup, args: dict[str, Any]) -> PrologueOut:
    options = {"quantize_q": setup.quantize_q, **dict(setup.options)}
    return jax.jit(functools.partial(qk_norm_rope_append, **options))(**args)


def stored(values: np.ndarray, scale: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """What a cache of ``dtype`` should hold for float64 values, and the bound of its rounding."""
    scaled = values / np.asarray(scale, np.float64)
    if np.dtype(dtype) == prologue_truth.E4M3:
        scaled = np.clip(scaled, -448, 448)
    # Half a spacing for the rounding itself, the rest for float32 arithmetic at a tie.
    return scaled, 0.51 * prologue_truth.spacing(scaled, dtype) + 4e-6 * np.abs(scaled) + 1e-7


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_against_float64(setup: Setup, rng: np.random.Generator) -> None:
    args = arguments(setup, rng)
    got = call(setup, args)
    host = {k: None if v is None else np.asarray(v).astype(np.float64) for k, v in args.items()}
    want = prologue_truth.prologue(
        host["qkv"],
        host["q_norm"],
        host["k_norm"],
        host["cos_sin"],
        TOKEN_POSITIONS,
        setup.kv_heads,
        setup.head_dim,
        **dict(setup.options),
    )

    q_scale: Any = 1.0
    if setup.quantize_q:
        q_scale = np.abs(want.q).max(axis=2) / 448
        assert_close(got.q_scale, q_scale, rtol=1e-5)
        q_scale = q_scale[:, :, None]
    else:
        assert got.q_scale is None
    assert got.q.dtype == (fp8.E4M3 if setup.quantize_q else setup.dtype)
    expected, bound = stored(want.q, q_scale, got.q.dtype)
    assert_close(got.q, expected, atol=bound)

    k_scale, v_scale = host.get("k_scale", 1.0), host.get("v_scale", 1.0)
    if setup.k_scale == "head":
        k_scale, v_scale = k_scale[:, None], v_scale[:, None]
    if setup.k_scale == "token":
        k_scale = np.abs(want.k).max(axis=2)[:, :, None] / 448
        scales = prologue_truth.append(args["k_scale_pages"], SLOTS, k_scale[:, :, 0])
        assert_close(got.k_scale_pages, scales, rtol=1e-5)
    else:
        assert got.k_scale_pages is None
    for name, values, scale in (("k_pages", want.k, k_scale), ("v_pages", want.v, v_scale)):
        expected, bound = stored(values, scale, setup.cache)
        pages = prologue_truth.append(args[name], SLOTS, expected)
        bounds = prologue_truth.append(np.zeros(pages.shape), SLOTS, bound)  # 0: untouched
        assert getattr(got, name).dtype == setup.cache
        assert_close(getattr(got, name), pages, atol=bounds)


def test_fp8_writes_saturate(rng: np.random.Generator) -> None:
    setup = Setup("saturate", cache=fp8.E4M3, weight=None, options=(("norm", None),))
    args = arguments(setup, rng)
    args["qkv"] = args["qkv"] * 1e4
    got = call(setup, args)
    values = np.asarray(got.v_pages).astype(np.float32)
    assert np.all(np.isfinite(values)) and np.abs(values).max() == 448.0


def test_a_row_of_nan_stays_in_its_row(rng: np.random.Generator) -> None:
    setup = Setup("nan", cache=fp8.E4M3, k_scale="token", quantize_q=True)
    args = arguments(setup, rng)
    run = jax.jit(functools.partial(qk_norm_rope_append, quantize_q=True))
    clean = run(**args)
    dirty = run(**{**args, "qkv": args["qkv"].at[2].set(jnp.nan)})  # token 2 is not written
    keep = np.arange(TOKENS) != 2
    assert np.all(np.isnan(np.asarray(dirty.q_scale)[2]))
    for field, rows in (("q", keep), ("q_scale", keep), *((f, ...) for f in clean._fields[2:])):
        assert_bitwise(
            np.asarray(getattr(dirty, field))[rows], np.asarray(getattr(clean, field))[rows]
        )


def test_a_zero_row_gets_scale_one(rng: np.random.Generator) -> None:
    setup = Setup("zero", cache=fp8.E4M3, k_scale="token", quantize_q=True)
    args = arguments(setup, rng)
    got = call(setup, {**args, "qkv": jnp.zeros_like(args["qkv"])})
    assert_close(got.q_scale, np.ones(got.q_scale.shape))
    assert_close(got.q, np.zeros(got.q.shape))
    assert_close(got.k_scale_pages[1, :, 1], [1.0, 1.0])  # slot 17


def test_no_tokens(rng: np.random.Generator) -> None:
    args = arguments(Setup("empty"), rng)
    args |= {name: args[name][:0] for name in ("qkv", "positions", "slots")}
    got = call(Setup("empty"), args)
    assert got.q.shape == (0, 4, 16)
    assert_bitwise(got.k_pages, args["k_pages"])


def test_python_floats_are_scales(rng: np.random.Generator) -> None:
    setup = Setup("float", cache=fp8.E4M3, k_scale="tensor")
    args = arguments(setup, rng)
    got = call(setup, args)
    del args["k_scale"], args["v_scale"]
    same = jax.jit(functools.partial(qk_norm_rope_append, k_scale=0.013, v_scale=0.02))(**args)
    assert_bitwise(same.k_pages, got.k_pages)
    assert_bitwise(same.v_pages, got.v_pages)


def test_vmap_folds_tokens_only(rng: np.random.Generator) -> None:
    setup = Setup("vmap")
    args = arguments(setup, rng)
    flat = call(setup, args)
    split = {
        n: args.pop(n).reshape(2, 3, *a.shape[1:])
        for n, a in list(args.items())
        if n in ("qkv", "positions", "slots")
    }
    mapped = jax.vmap(
        lambda t: qk_norm_rope_append(**t, **args),
        out_axes=PrologueOut(q=0, q_scale=None, k_pages=None, v_pages=None, k_scale_pages=None),
    )
    got = jax.jit(mapped)(split)
    assert_bitwise(got.q.reshape(flat.q.shape), flat.q)
    assert_bitwise(got.k_pages, flat.k_pages)
    with pytest.raises(NotImplementedError, match="vmap over argument 'k_pages'"):
        pages = args.pop("k_pages")
        tokens = jax.tree.map(lambda x: x[0], split)
        jax.vmap(lambda p: qk_norm_rope_append(**tokens, **args, k_pages=p).q)(pages[None])


# The cache is written in place: nothing of its size is copied, converted or allocated.

BIG = (512, 2, PAGE, 32)


def compiled(dtype: Any, per_token: bool, looped: bool) -> jax.stages.Compiled:
    def step(caches, qkv, positions, slots):
        out = qk_norm_rope_append(
            qkv,
            None,
            None,
            jnp.ones((8, 32), jnp.float32),
            positions,
            slots,
            *caches[:2],
            k_scale_pages=caches[2] if per_token else None,
        )
        return (out.k_pages, out.v_pages, out.k_scale_pages), out.q

    def loop(caches, qkv, positions, slots):
        def body(i, carry):
            caches, total = carry
            caches, q = step(caches, qkv + total, positions + i, slots + i)
            return caches, total + jnp.mean(q)

        return jax.lax.fori_loop(0, 5, body, (caches, jnp.float32(0)))

    pages = jax.ShapeDtypeStruct(BIG, dtype)
    scales = jax.ShapeDtypeStruct(BIG[:3], jnp.float32) if per_token else None
    tokens = [
        jax.ShapeDtypeStruct((3, *s), d) for s, d in (((6 * 32,), jnp.float32), ((), jnp.int32))
    ]
    function = jax.jit(loop if looped else step, donate_argnums=0)
    return function.lower((pages, pages, scales), tokens[0], tokens[1], tokens[1]).compile()


def full_size(program: jax.stages.Compiled, operations: str) -> list[str]:
    """Instructions named in ``operations`` whose result has the cache's shape."""
    shape = ",".join(str(n) for n in BIG)
    pattern = re.compile(rf"= \S*\[{shape}\]\S* ({operations})\(")
    return [line.strip() for line in program.as_text().splitlines() if pattern.search(line)]


@pytest.mark.parametrize("looped", [False, True], ids=["once", "loop"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bf16"])
def test_cache_is_written_in_place(dtype, looped) -> None:
    program = compiled(dtype, False, looped)
    assert full_size(program, "copy|copy-start|convert|transpose|select|bitcast-convert") == []
    one_cache = int(np.prod(BIG)) * jnp.dtype(dtype).itemsize
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * one_cache
    assert memory.temp_size_in_bytes < one_cache / 8


@pytest.mark.parametrize("looped", [False, True], ids=["once", "loop"])
def test_fp8_cache_is_written_without_a_copy_or_a_wider_type(looped) -> None:
    # XLA's CPU backend cannot store fp8 as such: a byte view is its cheapest form, and costs
    # one temporary of the cache's size on a CPU (none on a GPU).
    program = compiled(fp8.E4M3, True, looped)
    assert full_size(program, "copy|copy-start|convert|transpose|select") == []
    one_cache = int(np.prod(BIG))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * one_cache
    assert memory.temp_size_in_bytes < 2.2 * one_cache


F8 = Setup("fp8", cache=fp8.E4M3)
F32 = Setup("float32")


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("setup", "change", "error", "words"),
    [
        (F32, {"norm": "post"}, ValueError, "'norm' must be one of 'before', 'after', None"),
        (F32, {"norm": None}, ValueError, "'q_norm' must be None when norm=None"),
        (F32, {"rope_style": "neox"}, ValueError, "'rope_style' must be one of 'half'"),
        (F32, {"eps": np.ones(1)}, TypeError, r"'eps' must be a Python number .* float64\[1\]"),
        (F32, {"eps": -1.0}, ValueError, "'eps' must be finite and >= 0, got -1.0"),
        (F32, {"qkv": zeros(6, 63)}, ValueError, r"'qkv' must be of width \(Hq \+ 2 Hkv\) \* D"),
        (F32, {"qkv": zeros(6, 64)}, ValueError, "Hkv = 2, D = 16 and Hq >= 1, got 64"),
        (F32, {"qkv": zeros(6, 128, dtype=np.float16)}, TypeError, "'qkv' must be bfloat16 or"),
        (F32, {"positions": zeros(5, dtype=np.int32)}, ValueError, "'positions' must have shape"),
        (F32, {"positions": zeros(6)}, TypeError, "'positions' must be int32"),
        (
            F32,
            {"slots": zeros(6, dtype=np.uint32)},
            TypeError,
            "'slots' must be int32, got uint32",
        ),
        (
            F32,
            {"cos_sin": zeros(9, 18)},
            ValueError,
            "'cos_sin' must be of an even width <= D = 16",
        ),
        (F32, {"cos_sin": zeros(9, 7)}, ValueError, "'cos_sin' must be of an even width"),
        (F32, {"cos_sin": zeros(0, 8)}, ValueError, "'cos_sin' must be of at least one row"),
        (F32, {"cos_sin": zeros(9, 8, dtype=np.float16)}, TypeError, "'cos_sin' must be float32"),
        (F32, {"q_norm": zeros(8)}, ValueError, r"'q_norm' must have shape \[D\] with D = 16"),
        (F32, {"k_norm": zeros(16, dtype=np.float16)}, TypeError, "'k_norm' must be bfloat16 or"),
        (F32, {"v_pages": zeros(4, 2, 32, 16)}, ValueError, "N = 16 from 'k_pages'"),
        (F32, {"k_pages": zeros(4, 2, 16, 16, dtype=np.float16)}, TypeError, "'k_pages' must be"),
        (F32, {"k_scale": 1.0}, ValueError, "'k_scale' must be None on a cache of float32, which"),
        (
            F32,
            {"k_scale_pages": zeros(4, 2, 16)},
            ValueError,
            "'k_scale_pages' must be None on a cache of float32",
        ),
        (F8, {"k_scale": zeros(3)}, ValueError, r"'k_scale' must have shape \[Hkv\] with Hkv = 2"),
        (F8, {"v_scale": zeros(4, 2, 16)}, ValueError, r"'v_scale' must be of shape \[\] or \[H"),
        (F8, {"k_scale_pages": 1.0}, TypeError, "'k_scale_pages' must be an array, got float"),
        (F8, {"v_scale": zeros(2, dtype=np.float16)}, TypeError, "'v_scale' must be float32"),
        (F8, {"k_scale_pages": zeros(4, 16, 2)}, ValueError, "'k_scale_pages' must have shape"),
        (
            F8,
            {"k_scale": 1.0, "k_scale_pages": zeros(4, 2, 16)},
            ValueError,
            "'k_scale' must be None when k_scale_pages is given",
        ),
    ],
)
def test_refuses(setup, change, error, words, rng) -> None:
    args = {**arguments(setup, rng), **change}
    with pytest.raises(error, match=f"qk_norm_rope_append: argument .*{words}"):
        qk_norm_rope_append(**args)


def test_refuses_a_kernel_and_a_gradient(rng) -> None:
    args = arguments(F32, rng)
    with pytest.raises(NotImplementedError, match="qkv must be bfloat16, got float32"):
        qk_norm_rope_append(**args, implementation="cuda")
    qkv = args.pop("qkv")
    with pytest.raises(NotImplementedError, match="qk_norm_rope_append cannot be differentiated"):
        jax.grad(lambda x: qk_norm_rope_append(x, **args).q.sum())(qkv)
