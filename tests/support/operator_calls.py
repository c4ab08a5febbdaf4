"""Small calls of every operator, and of every kernel, for tests that hold for all of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_hpc
from jax_hpc import _registry
from jax_hpc.ops.fused_moe import quantize_experts_blockwise, quantize_experts_per_tensor


@dataclasses.dataclass(frozen=True)
class Call:
    """run(x, rest, implementation) -> pytree; x is the operand that transformations vary.

    x_spec, rest_spec, out_spec: how shard_map over the axis "t" splits the call into
    independent parts.
    float_x: whether x is real-valued, so that a gradient can be asked for.
    launches: kernels of one call, where it takes the kernel.
    in_place: it writes into rest, which XLA copies wherever a program does not donate it.
    """

    name: str
    run: Callable[..., Any]
    x: jax.Array
    rest: Any
    x_spec: Any
    rest_spec: Any
    out_spec: Any
    float_x: bool = True
    launches: int = 1
    in_place: bool = False


def _array(rng: np.random.Generator, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(rng.normal(0, 1, shape).astype(np.float32)).astype(dtype)


def _integers(values: Any) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def _router_gemm(
    rng: np.random.Generator, tokens: int = 8, hidden: int = 32, experts: int = 16
) -> Call:
    weight = jax_hpc.split_router_weight(_array(rng, experts, hidden))

    def run(x: Any, rest: Any, implementation: Any = "auto") -> Any:
        return jax_hpc.router_gemm(x, rest, implementation=implementation)

    return Call("router_gemm", run, _array(rng, tokens, hidden), weight, P("t"), P(), P("t"))


def _route_topk(rng: np.random.Generator, experts: int = 16) -> Call:
    def run(x: Any, rest: Any, implementation: Any = "auto") -> Any:
        return jax_hpc.route_topk(x, 3, bias=rest, renormalize=True, implementation=implementation)

    logits, bias = _array(rng, 8, experts), _array(rng, experts)
    return Call("route_topk", run, logits, bias, P("t"), P(), P("t"))


def _router_topk(
    rng: np.random.Generator, tokens: int = 8, hidden: int = 32, experts: int = 16
) -> Call:
    weight = jax_hpc.split_router_weight(_array(rng, experts, hidden))
    bias = _array(rng, experts)

    def run(x: Any, rest: Any, implementation: Any = "auto") -> Any:
        weight, bias = rest
        return jax_hpc.router_topk(x, weight, 3, bias=bias, implementation=implementation)

    x = _array(rng, tokens, hidden)
    return Call("router_topk", run, x, (weight, bias), P("t"), P(), P("t"), launches=2)


def _pages(
    rng: np.random.Generator, heads: int, dim: int = 16, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    k, v = (_array(rng, 6, heads, 16, dim, dtype=dtype) for _ in range(2))
    return k, v


def _decode_attention(
    rng: np.random.Generator,
    dim: int = 16,
    dtype: Any = jnp.float32,
    width: int = 40,
    **options: Any,
) -> Call:
    """A page table of 40 entries holds sequences that a kernel would cut."""
    k, v = _pages(rng, 4, dim, dtype)
    table, lens = _integers([[0, 3], [5, -1], [1, 2]]), _integers([20, 7, 0])
    table = jnp.pad(table, ((0, 0), (0, width - 2)), constant_values=-1)

    def run(x: Any, rest: Any, implementation: Any = "auto") -> Any:
        return jax_hpc.decode_attention(x, *rest, **options, implementation=implementation)

    heads = P(None, "t")
    return Call(
        "decode_attention",
        run,
        _array(rng, 3, 8, dim),
        (k, v, table, lens),
        heads,
        (heads, heads, P(), P()),
        heads,
        launches=3,
    )


def _decode_attention_kernel(rng: np.random.Generator, launches: int, **options: Any) -> Call:
    call = _decode_attention(rng, 64, jnp.bfloat16, **options)
    return dataclasses.replace(call, launches=launches)


def _fp8_decode_attention(rng: np.random.Generator) -> Call:
    return _decode_attention(rng, 64, jnp.float8_e4m3fn)


def _scheduled_decode_attention(rng: np.random.Generator) -> Call:
    """On a ready schedule. It is of all heads, so that no shard can have a part of them."""
    call = _decode_attention(rng, 64, jnp.bfloat16)
    k, v, table, lens = call.rest
    schedule = jax_hpc.decode_schedule(
        lens,
        num_q_heads=8,
        num_kv_heads=4,
        head_dim=64,
        kv_dtype=k.dtype,
        page_size=16,
        num_ctas=8,
    )
    return dataclasses.replace(
        call,
        rest=(k, v, table, lens, schedule),
        x_spec=P(),
        rest_spec=P(),
        out_spec=P(),
        launches=2,
    )


def _prefill_attention(rng: np.random.Generator, dim: int = 16, dtype: Any = jnp.float32) -> Call:
    k, v = _pages(rng, 4, dim, dtype)
    rest = (k, v, _integers([[0, 3], [5, -1]]), *map(_integers, ([1, 5], [4, 2], [20, 7])))

    def run(x: Any, rest: Any, implementation: Any = "auto") -> Any:
        return jax_hpc.prefill_attention(x, *rest, max_q_len=4, implementation=implementation)

    heads = P(None, "t")
    return Call(
        "prefill_attention",
        run,
        _array(rng, 8, 8, dim),
        rest,
        heads,
        (heads, heads, P(), P(), P(), P()),
        heads,
        launches=2,
    )


def _decode_schedule(rng: np.random.Generator) -> Call:
    def run(x: Any, rest: Any, implementation: Any = "auto") -> Any:
        del rest
        schedule = jax_hpc.decode_schedule(
            x,
            num_q_heads=8,
            num_kv_heads=2,
            head_dim=64,
            kv_dtype=jnp.bfloat16,
            page_size=16,
            num_ctas=8,
            implementation=implementation,
        )
        return schedule.span_pair, schedule.span_tile, schedule.merge_last

    lens = _integers(rng.integers(0, 4000, 8))
    return Call("decode_schedule", run, lens, (), P("t"), (), P("t"), float_x=False)


def _qk_norm_rope_append(
    rng: np.random.Generator, dim: int = 16, dtype: Any = jnp.float32, **options: Any
) -> Call:
    k, v = _pages(rng, 4, dim, dtype)
    norm = _array(rng, dim)
    table = jnp.asarray(jax_hpc.rope_table(32, dim, 1e4))
    # Heads are split over four ranks, each rank's rows being q q k v.
    rest = (norm, norm, table, _integers([0, 31, 5]), _integers([17, -1, 40]), k, v)

    def run(x: Any, rest: Any, implementation: Any = "auto") -> Any:
        out = jax_hpc.qk_norm_rope_append(x, *rest, **options, implementation=implementation)
        return out.q, out.k_pages, out.v_pages

    heads = P(None, "t")
    return Call(
        "qk_norm_rope_append",
        run,
        _array(rng, 3, (8 + 2 * 4) * dim),
        rest,
        heads,
        (P(), P(), P(), P(), P(), heads, heads),
        (heads, heads, heads),
        in_place=True,
    )


def _fused_moe(rng: np.random.Generator) -> Call:
    experts = jax_hpc.DenseExperts(_array(rng, 4, 2, 16, 32), _array(rng, 4, 32, 16))
    ids = _integers(rng.integers(-1, 5, (8, 2)))
    rest = (ids, jnp.abs(_array(rng, 8, 2)), experts)

    def run(x: Any, rest: Any, implementation: Any = "auto") -> Any:
        return jax_hpc.fused_moe(x, *rest, implementation=implementation)

    rows = P("t")
    return Call("fused_moe", run, _array(rng, 8, 32), rest, rows, (rows, rows, P()), rows)


def _moe_kernel(rng: np.random.Generator, launches: int = 4, **sizes: Any) -> Call:
    """In fp8 per tensor, or by blocks of ``block_rows``; or in bf16."""
    num_experts, inter = sizes.get("num_experts", 4), sizes.get("inter", 48)
    tokens = sizes.get("tokens", 8)
    weights = _array(rng, num_experts, 2, inter, 64), _array(rng, num_experts, 64, inter)
    experts: Any = jax_hpc.DenseExperts(*weights)
    if sizes.get("is_bf16"):
        experts = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), experts)
    elif "block_rows" in sizes:
        experts = quantize_experts_blockwise(experts, block_rows=sizes["block_rows"])
    else:
        experts = quantize_experts_per_tensor(experts, input_scale=0.01, act_scale=0.5)
    ids = _integers(rng.integers(-1, num_experts + 1, (tokens, 2)))
    rest = (ids, jnp.abs(_array(rng, tokens, 2)), experts)
    call = _fused_moe(rng)
    x = _array(rng, tokens, 64, dtype=jnp.bfloat16)
    return dataclasses.replace(call, x=x, rest=rest, launches=launches)


def _rms_norm(
    rng: np.random.Generator,
    hidden: int = 32,
    dtype: Any = jnp.float32,
    out_scale: float | None = None,
    in_place: bool = True,
) -> Call:
    """In place: with a residual, whose memory the sum takes."""
    residual = _array(rng, 8, hidden, dtype=dtype) if in_place else None

    def run(x: Any, rest: Any, implementation: Any = "auto") -> Any:
        weight, residual = rest
        return jax_hpc.rms_norm(
            x, weight, residual=residual, out_scale=out_scale, implementation=implementation
        )

    rows = P("t")
    return Call(
        "rms_norm",
        run,
        _array(rng, 8, hidden, dtype=dtype),
        (_array(rng, hidden), residual),
        rows,
        (P(), rows if in_place else None),
        rows,
        in_place=in_place,
    )


MAKERS = {
    "decode_attention": _decode_attention,
    "decode_schedule": _decode_schedule,
    "fused_moe": _fused_moe,
    "prefill_attention": _prefill_attention,
    "qk_norm_rope_append": _qk_norm_rope_append,
    "rms_norm": _rms_norm,
    "route_topk": _route_topk,
    "router_gemm": _router_gemm,
    "router_topk": _router_topk,
}

# Sizes of router products that take the product's kernels, clusters and tiles in turn.
ROUTER_PATHS: dict[str, dict[str, int]] = {
    "few tokens": {"tokens": 8, "hidden": 32, "experts": 16},
    "few tokens, cluster": {"tokens": 8, "hidden": 4096, "experts": 192},
    "64 tokens, cluster": {"tokens": 64, "hidden": 4096, "experts": 192},
    "many tokens": {"tokens": 4096, "hidden": 512, "experts": 192},
    "unaligned rows": {"tokens": 24, "hidden": 33, "experts": 16},
}


def _paths_of(make: Callable[..., Call], paths: dict[str, dict[str, int]]) -> dict[str, Any]:
    return {path: functools.partial(make, **sizes) for path, sizes in paths.items()}


# 46 rows an expert, tasks for 132 SMs: the least that takes the wide products of every format.
WIDE_MOE = {"launches": 5, "tokens": 782, "num_experts": 34, "inter": 256}

# Operators whose kernels have several paths, each with its own call.
_PATHS = {
    "decode_attention": {
        "ready schedule": _scheduled_decode_attention,
        "own schedule": functools.partial(_decode_attention_kernel, launches=3),
        "fp8 cache": _fp8_decode_attention,
        "four splits": functools.partial(_decode_attention_kernel, launches=2, num_splits=4),
        "uncut": functools.partial(_decode_attention_kernel, launches=1, num_splits=1),
        "short page table": functools.partial(_decode_attention_kernel, launches=2, width=2),
        "short window": functools.partial(_decode_attention_kernel, launches=2, window=448),
    },
    "fused_moe": {
        "bf16": functools.partial(_moe_kernel, is_bf16=True),
        "per tensor": _moe_kernel,
        "blocks": functools.partial(_moe_kernel, block_rows=128),
        "blocks of 64 rows": functools.partial(_moe_kernel, block_rows=64),
        "many pairs": functools.partial(_moe_kernel, tokens=1026),
        "most pairs": functools.partial(_moe_kernel, launches=5, tokens=8194),
        "wide": functools.partial(_moe_kernel, **WIDE_MOE),
        "wide, blocks": functools.partial(_moe_kernel, block_rows=128, **WIDE_MOE),
        "wide, bf16": functools.partial(_moe_kernel, is_bf16=True, **WIDE_MOE),
        "wide, most pairs": functools.partial(
            _moe_kernel, **WIDE_MOE | {"launches": 6, "tokens": 8194}
        ),
    },
    "prefill_attention": {
        "bf16": functools.partial(_prefill_attention, dim=64, dtype=jnp.bfloat16),
        "fp8 cache": functools.partial(_prefill_attention, dim=128, dtype=jnp.float8_e4m3fn),
    },
    "qk_norm_rope_append": {
        "bf16 cache": functools.partial(_qk_norm_rope_append, dim=64, dtype=jnp.bfloat16),
        "fp8": functools.partial(
            _qk_norm_rope_append, dim=128, dtype=jnp.float8_e4m3fn, quantize_q=True
        ),
    },
    "rms_norm": {
        "residual": functools.partial(_rms_norm, hidden=2048, dtype=jnp.bfloat16),
        "no residual": functools.partial(
            _rms_norm, hidden=2056, dtype=jnp.bfloat16, in_place=False
        ),
        "fp8": functools.partial(
            _rms_norm, hidden=6144, dtype=jnp.bfloat16, out_scale=0.25, in_place=False
        ),
    },
    "route_topk": _paths_of(
        _route_topk,
        {
            "few experts": {"experts": 16},
            "several warps a token": {"experts": 400},
            "many experts": {"experts": 1500},
        },
    ),
    "router_gemm": _paths_of(_router_gemm, ROUTER_PATHS),
    "router_topk": _paths_of(
        _router_topk,
        ROUTER_PATHS | {"many experts": {"tokens": 8, "hidden": 32, "experts": 1500}},
    ),
}


def kernel_makers() -> dict[str, Callable[[np.random.Generator], Call]]:
    """A maker of a call that a kernel takes, for every path of every operator that has one."""
    makers = {}
    for name in sorted(name for name, op in _registry.OPERATORS.items() if op.kernel is not None):
        for path, make in _PATHS.get(name, {"": MAKERS[name]}).items():
            makers[f"{name}: {path}" if path else name] = functools.partial(_for_kernel, make)
    return makers


def _for_kernel(make: Callable[[np.random.Generator], Call], rng: np.random.Generator) -> Call:
    """The call bound to its kernel, with activations in bf16 where it takes no others."""
    call = make(rng)
    run = functools.partial(call.run, implementation="cuda")
    try:
        jax.eval_shape(run, call.x, call.rest)
    except NotImplementedError:
        call = dataclasses.replace(call, x=call.x.astype(jnp.bfloat16))
    return dataclasses.replace(call, run=run)
