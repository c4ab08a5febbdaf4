"""The Flax modules: against the operators they are made of, split over a mesh, in nnx's ways."""

import dataclasses
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_hpc
from jax_hpc import _registry, fp8, nn
from jax_hpc.cache import LayerPages
from jax_hpc.step import StepInputs
from tests.support.meshes import host_mesh
from tests.support.numerics import assert_bitwise, assert_close

H, HQ, HKV, D, N = 32, 4, 2, 16, 16


def rngs() -> nnx.Rngs:
    return nnx.Rngs(3)


def array(rng: np.random.Generator, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(rng.normal(0, 1, shape).astype(np.float32)).astype(dtype)


def test_rms_norm_against_float64(rng: np.random.Generator) -> None:
    for dtype, bound in ((jnp.float32, 1e-6), (jnp.bfloat16, 2.0**-8)):
        norm = nn.RMSNorm(H, eps=1e-5, dtype=dtype)
        norm.weight[...] = array(rng, H, dtype=dtype)
        x = array(rng, 5, H, dtype=dtype)
        x64, w64 = (np.asarray(a).astype(np.float64) for a in (x, norm.weight[...]))
        want = x64 / np.sqrt((x64**2).mean(axis=-1, keepdims=True) + 1e-5) * w64
        got = norm(x)
        assert got.dtype == dtype
        assert_close(got, want, rtol=bound)


def test_rms_norm_adds_a_residual_first(rng: np.random.Generator) -> None:
    norm = nn.RMSNorm(H, dtype=jnp.bfloat16)
    norm.weight[...] = array(rng, H, dtype=jnp.bfloat16)
    x, residual = (array(rng, 2, 3, H, dtype=jnp.bfloat16) for _ in range(2))
    y, h = norm(x, residual)
    assert_bitwise(h, x + residual)
    assert_bitwise(y, norm(h))
    with pytest.raises(NotImplementedError, match="rms_norm: no CUDA kernel .*H must be"):
        jax.eval_shape(nn.RMSNorm(H - 1, implementation="cuda"), x[..., 1:])


def test_linear_precision_and_output_dtype(rng: np.random.Generator) -> None:
    layer = nn.Linear(256, 8, rngs=rngs(), dtype=jnp.float32)
    x = array(rng, 3, 256)
    want = np.asarray(x).astype(np.float64) @ np.asarray(layer.weight[...]).astype(np.float64).T
    assert_close(layer(x), want, atol=1e-5)
    text = jax.jit(lambda x: layer(x)).lower(x).as_text()
    assert "HIGHEST" in text, "a GPU would multiply float32 in TF32"
    x, weight = array(rng, 3, 256, dtype=jnp.bfloat16), array(rng, 8, 256, dtype=jnp.bfloat16)
    assert nn.project(x, weight).dtype == jnp.bfloat16
    assert nn.project(x, weight, out_dtype=jnp.float32).dtype == jnp.float32


def fp8_linear(rng: np.random.Generator, inputs: int, outputs: int, dtype: Any) -> nn.Linear:
    """A linear of two stacked matrices, whose scales differ twentyfold."""
    layer = nn.Linear(inputs, outputs, rngs=rngs(), dtype=dtype, format="fp8_tensor")
    scale = np.repeat(np.float32([0.01, 0.2]), [outputs // 4, outputs - outputs // 4])
    layer.weight_scale[...] = jnp.asarray(scale)
    layer.input_scale[...] = jnp.float32(0.02)
    return layer


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fp8_linear_against_float64_with_the_same_quantisation(
    rng: np.random.Generator, dtype: Any
) -> None:
    layer = fp8_linear(rng, 256, 48, dtype)
    x = array(rng, 5, 256, dtype=dtype) * jnp.asarray(4, dtype)  # some saturate, at 448 * 0.02
    values = np.asarray(fp8.quantize(x, layer.input_scale[...])).astype(np.float64)
    weight = np.asarray(layer.weight[...]).astype(np.float64)
    scale = np.asarray(layer.weight_scale[...]).astype(np.float64) * 0.02
    want = values @ weight.T * scale
    got = layer(x)
    assert got.dtype == dtype and np.abs(values).max() == 448
    rounding = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-20
    terms = np.abs(values) @ np.abs(weight).T * scale
    assert_close(got, want, atol=2.0**-20 * terms, rtol=rounding)


def test_fp8_linear_multiplies_fp8_in_a_program_for_a_gpu(rng: np.random.Generator) -> None:
    layer = fp8_linear(rng, 64, 48, jnp.bfloat16)
    traced = jax.jit(lambda x: layer(x)).trace(jnp.zeros((3, 64), jnp.bfloat16))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    product = re.search(r"stablehlo.dot_general.*", text)
    assert product and re.search(r"tensor<3x64xf8E4M3FN>, tensor<48x64xf8E4M3FN>", product[0])


def test_linear_checks_its_format_and_x() -> None:
    with pytest.raises(ValueError, match="Linear: argument 'format' must be one of 'dense', 'fp8"):
        nn.Linear(8, 8, rngs=rngs(), format="int8")  # pyright: ignore[reportArgumentType]
    expected = r"Linear: argument 'x' must be of shape \[..., in_features = 8\], got .*2, 7"
    with pytest.raises(ValueError, match=expected):
        nn.Linear(8, 8, rngs=rngs())(jnp.ones((2, 7)))


def test_embedding_clamps() -> None:
    embed = nn.Embedding(4, 3, rngs=rngs(), dtype=jnp.float32)
    got = embed(jnp.array([3, -1, 9], jnp.int32))
    np.testing.assert_array_equal(got, embed.weight[...][jnp.array([3, 0, 3])])


def test_router_is_the_two_operators_and_honours_active(rng: np.random.Generator) -> None:
    router = nn.SplitRouter(
        H, 16, 3, rngs=rngs(), scoring="sigmoid", renormalize=True, scale=2.5, use_bias=True
    )
    assert router.bias is not None
    router.bias[...] = array(rng, 16)
    x = array(rng, 6, H, dtype=jnp.bfloat16)
    logits = jax_hpc.router_gemm(x, jax_hpc.SplitWeight(router.parts[...]))
    want = jax_hpc.route_topk(
        logits, 3, scoring="sigmoid", bias=router.bias[...], renormalize=True, scale=2.5
    )
    active = jnp.array([True, False, True, True, False, True])
    got = router(x, active)
    np.testing.assert_array_equal(got.weights, want.weights)
    np.testing.assert_array_equal(got.ids, np.where(np.asarray(active)[:, None], want.ids, -1))
    np.testing.assert_array_equal(router(x).ids, want.ids)


def test_an_inactive_row_has_no_identity_part(rng: np.random.Generator) -> None:
    router = nn.SplitRouter(H, 16, 4, rngs=rngs(), num_zero_experts=8)
    x = array(rng, 32, H, dtype=jnp.bfloat16)
    active = jnp.arange(32) % 3 != 1
    every, got = router(x).identity_weight, router(x, active)
    assert np.count_nonzero(np.asarray(every)[~np.asarray(active)]), "else this tests nothing"
    np.testing.assert_array_equal(got.identity_weight, np.where(active, every, 0))
    assert (np.asarray(got.ids)[~np.asarray(active)] == -1).all()


@pytest.mark.parametrize("format", ["dense", "fp8_block", "fp8_tensor"])
def test_moe_is_the_operator(rng: np.random.Generator, format: Any) -> None:
    moe = nn.FusedMoE(H, 4, 16, rngs=rngs(), format=format, dtype=jnp.float32)
    x, shared = array(rng, 5, H), array(rng, 5, H)
    ids = jnp.asarray(rng.integers(0, 4, (5, 2)), jnp.int32)
    weights, identity = jnp.abs(array(rng, 5, 2)), jnp.abs(array(rng, 5))
    extras = dict(shared_output=shared, identity_weight=identity)
    want = jax_hpc.fused_moe(x, ids, weights, moe.experts, **extras)
    np.testing.assert_array_equal(moe(x, ids, weights, **extras), want)
    assert np.isfinite(np.asarray(want)).all() and np.abs(np.asarray(want)).max() > 0


def test_moe_format_is_checked() -> None:
    with pytest.raises(
        ValueError, match="FusedMoE: argument 'format' must be one of 'dense'.*'int4'"
    ):
        nn.FusedMoE(H, 4, 16, rngs=rngs(), format="int4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="FusedMoE: argument 'block_rows' must be one of 128, 64"):
        nn.FusedMoE(H, 4, 16, rngs=rngs(), format="fp8_block", block_rows=32)


@pytest.mark.parametrize("split", ["experts", "intermediate"])
def test_moe_over_a_mesh_equals_one_device(rng: np.random.Generator, split: str) -> None:
    """Experts split over ranks, or each expert's intermediate size; extras counted once."""
    whole = nn.FusedMoE(H, 4, 32, rngs=rngs(), dtype=jnp.float32)
    x, shared = array(rng, 5, H), array(rng, 5, H)
    ids = jnp.asarray(rng.integers(-1, 4, (5, 2)), jnp.int32)
    weights, identity = jnp.abs(array(rng, 5, 2)), jnp.abs(array(rng, 5))
    want = whole(x, ids, weights, shared_output=shared, identity_weight=identity)
    by_expert = split == "experts"
    part = nn.FusedMoE(
        H,
        4,
        32,
        rngs=rngs(),
        dtype=jnp.float32,
        expert_axis="t" if by_expert else None,
        reduce_axis="t",
    )
    graph, params = nnx.split(part)
    split_at = P("t") if by_expert else P(None, None, "t")
    specs = jax.tree.map(lambda _: split_at, params)

    def run(params: Any, x: jax.Array, half: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(
            x, ids, weights, shared_output=half, identity_weight=identity
        )

    sharded = jax.shard_map(run, mesh=host_mesh(2), in_specs=(specs, P(), P()), out_specs=P())
    assert_close(jax.jit(sharded)(params, x, shared / 2), want, atol=1e-5)


@dataclasses.dataclass
class Setup:
    module: nn.PagedAttention
    x: jax.Array
    inputs: StepInputs
    pages: LayerPages
    cos_sin: jax.Array


def attention(rng: np.random.Generator, dtype: Any = jnp.float32, **options: Any) -> Setup:
    module = nn.PagedAttention(H, HQ, HKV, D, rngs=rngs(), dtype=jnp.float32, **options)
    if module.q_norm is not None and module.k_norm is not None:
        module.q_norm[...], module.k_norm[...] = array(rng, D), array(rng, D)
    if module.sinks is not None:
        module.sinks[...] = array(rng, HQ)
    shape = (6, HKV, N, D)
    k, v = array(rng, *shape).astype(dtype), array(rng, *shape).astype(dtype)
    lens = np.array([19, 3], np.int32)
    table = jnp.array([[4, 1], [2, -1]], jnp.int32)
    inputs = StepInputs(
        tokens=jnp.zeros(2, jnp.int32),
        positions=jnp.asarray(lens - 1),
        slots=jnp.array([1 * N + 2, 2 * N + 2], jnp.int32),
        page_table=table,
        kv_lens=jnp.asarray(lens),
    )
    table_rows = jnp.asarray(jax_hpc.rope_table(64, D, 1e4))
    return Setup(module, array(rng, 2, H), inputs, LayerPages(k, v), table_rows)


def as_prefill(inputs: StepInputs) -> StepInputs:
    return dataclasses.replace(
        inputs,
        q_starts=jnp.array([0, 1], jnp.int32),
        q_lens=jnp.array([1, 1], jnp.int32),
        max_q_len=2,
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 4, "use_sinks": True}, {"norm": None, "rope_style": "interleaved"}],
    ids=["plain", "window+sinks", "no norm"],
)
def test_decode_and_prefill_agree(rng: np.random.Generator, options: dict[str, Any]) -> None:
    s = attention(rng, **options)
    run = jax.jit(lambda x, inputs, pages: s.module(x, inputs, pages, s.cos_sin))
    schedule = s.module.schedule(s.inputs, s.pages)
    y, pages = run(s.x, dataclasses.replace(s.inputs, schedule=schedule), s.pages)
    y2, pages2 = run(s.x, as_prefill(s.inputs), s.pages)
    assert_close(y, y2, atol=1e-5)
    for a, b in zip(jax.tree.leaves(pages), jax.tree.leaves(pages2), strict=True):
        np.testing.assert_array_equal(a, b)
    before = np.asarray(s.pages.k_pages)
    changed = np.argwhere((np.asarray(pages.k_pages) != before).any(axis=(1, 3)))
    assert changed.tolist() == [[1, 2], [2, 2]]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_a_step_takes_the_kernels_of_its_kind(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    """By the shapes of the step alone, in a program for a GPU."""
    monkeypatch.setattr(_registry, "unusable_reason", lambda: None)
    module = nn.PagedAttention(H, 8, 2, 64, rngs=rngs())
    pages = jnp.zeros((6, 2, N, 64), dtype)
    rows = {"decode": (2, 6), "prefill": (7,)}  # one or three of each sequence, or any
    cos_sin = jnp.asarray(jax_hpc.rope_table(64, 64, 1e4))
    run = jax.jit(lambda x, inputs, pages: module(x, inputs, pages, cos_sin))
    for kind, counts in rows.items():
        for count in counts:
            ints, lens = jnp.zeros(count, jnp.int32), jnp.ones(2, jnp.int32)
            inputs = StepInputs(ints, ints, ints, jnp.zeros((2, 2), jnp.int32), lens)
            inputs = as_prefill(inputs) if kind == "prefill" else inputs
            traced = run.trace(
                jnp.zeros((count, H), jnp.bfloat16), inputs, LayerPages(pages, pages)
            )
            with warnings.catch_warnings():
                warnings.simplefilter("error", jax_hpc.FallbackWarning)
                text = traced.lower(lowering_platforms=("cuda",)).as_text()
            taken = set(re.findall(r"@jax_hpc\.(\w+_attention)\.", text))
            assert taken == {f"{kind}_attention"}
            assert "@jax_hpc.qk_norm_rope_append." in text


def test_fp8_cache_with_static_and_dynamic_scales(rng: np.random.Generator) -> None:
    s = attention(rng)
    want, _ = s.module(s.x, s.inputs, s.pages, s.cos_sin)
    k_scale, v_scale = jnp.float32(0.3), jnp.float32(2.5)
    s.module.k_scale[...], s.module.v_scale[...] = k_scale, v_scale
    k8, v8 = fp8.quantize(s.pages.k_pages, k_scale), fp8.quantize(s.pages.v_pages, v_scale)
    scales = jnp.full((6, HKV, N), k_scale)
    for pages in (LayerPages(k8, v8), LayerPages(k8, v8, scales)):
        got, after = s.module(s.x, s.inputs, pages, s.cos_sin)
        a, b = np.asarray(got).ravel(), np.asarray(want).ravel()
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.995
        assert after.k_pages.dtype == jnp.float8_e4m3fn
        if pages.k_scale_pages is not None:
            assert after.k_scale_pages is not None
            written = np.asarray(after.k_scale_pages)[[1, 2], :, 2]
            assert (written != k_scale).all()


def test_heads_over_a_mesh_equal_one_device(rng: np.random.Generator) -> None:
    s = attention(rng)
    want, want_pages = s.module(s.x, s.inputs, s.pages, s.cos_sin)
    part = nn.PagedAttention(H, HQ, HKV, D, rngs=rngs(), dtype=jnp.float32, reduce_axis="t")
    graph, _ = nnx.split(part)
    _, params = nnx.split(s.module)
    # Rank-major rows: q k v of rank 0, then of rank 1.
    rows = np.arange((HQ + 2 * HKV) * D).reshape(HQ + 2 * HKV, D)
    ranks = [[0, 1, 4, 6], [2, 3, 5, 7]]
    order = np.concatenate([rows[heads].ravel() for heads in ranks])
    qkv = params["qkv_proj"]["weight"][...]
    params["qkv_proj"]["weight"][...] = qkv[order]
    spec = jax.tree.map(lambda _: P(), params)
    spec["qkv_proj"]["weight"] = P("t")
    spec["o_proj"]["weight"] = P(None, "t")
    heads = LayerPages(P(None, "t"), P(None, "t"))  # pyright: ignore[reportArgumentType]

    def run(params: Any, x: jax.Array, pages: LayerPages) -> Any:
        return nnx.merge(graph, params)(x, s.inputs, pages, s.cos_sin)

    sharded = jax.shard_map(
        run, mesh=host_mesh(2), in_specs=(spec, P(), heads), out_specs=(P(), heads)
    )
    got, pages = jax.jit(sharded)(params, s.x, s.pages)
    assert_close(got, want, atol=1e-5)
    assert_close(pages.k_pages, want_pages.k_pages, atol=1e-6)


def test_modules_are_made_without_arrays() -> None:
    """nnx.eval_shape builds a whole module of shapes, for a loader to fill."""
    module = nnx.eval_shape(lambda: nn.PagedAttention(H, HQ, HKV, D, rngs=rngs()))
    leaves = jax.tree.leaves(nnx.split(module)[1])
    assert leaves and all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
