"""The operator framework itself, on a toy operator with a kernel that exists only as a target."""

import dataclasses
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_hpc import FallbackWarning, _primitive, _registry
from jax_hpc._primitive import Fold, Kernel, Operator
from tests.support.meshes import host_mesh


class Operands(NamedTuple):
    x: jax.Array
    bias: jax.Array | None
    pages: jax.Array


class Results(NamedTuple):
    y: Any
    pages: Any


@dataclasses.dataclass(frozen=True)
class Params:
    factor: float


def shape_rule(operands: Operands, params: Params) -> Results:
    del params
    return Results(
        jax.ShapeDtypeStruct(operands.x.shape, jnp.float32),
        jax.ShapeDtypeStruct(operands.pages.shape, operands.pages.dtype),
    )


def reference(operands: Operands, params: Params) -> Results:
    y = operands.x.astype(jnp.float32) * params.factor
    if operands.bias is not None:
        y = y + operands.bias
    return Results(y, operands.pages.at[0].set(1.0))


def _unsupported(operands: Operands, params: Params) -> str | None:
    del params
    return "x must be bf16" if operands.x.dtype != jnp.bfloat16 else None


KERNEL = Kernel(
    "jax_hpc.toy.v1",
    unsupported=_unsupported,
    attributes=lambda _, params: {"factor": np.float32(params.factor)},
    workspaces=lambda operands, _: [jax.ShapeDtypeStruct((operands.x.shape[0], 7), jnp.int32)],
    aliases={"pages": "pages"},
)


def make(kernel: Kernel | None, fold: Fold | None = None) -> Operator:
    return Operator(
        "toy",
        shape_rule=shape_rule,
        reference=reference,
        kernel=kernel,
        fold=fold,
        gradient="use jnp",
    )


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Toys leave no trace in the registry, and every test sees the first warning again."""
    before = dict(_registry.OPERATORS)
    _primitive._WARNED.clear()
    yield
    _registry.OPERATORS.clear()
    _registry.OPERATORS.update(before)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower for cuda as a host without a GPU does, whatever this machine has."""
    monkeypatch.setattr(_registry, "unusable_reason", lambda: None)


def operands(dtype: Any = jnp.bfloat16, bias: bool = True) -> Operands:
    return Operands(
        jnp.arange(6, dtype=jnp.float32).reshape(3, 2).astype(dtype),
        jnp.full((3, 2), 0.5) if bias else None,
        jnp.zeros((4, 2)),
    )


def lower(
    operator: Operator, implementation: str, platforms: tuple[str, ...], **kwargs: Any
) -> str:
    def call(operands: Operands) -> Results:
        return operator(operands, Params(2.0), implementation=implementation)

    return jax.jit(call).trace(operands(**kwargs)).lower(lowering_platforms=platforms).as_text()


def test_eager_and_jit_agree_and_optional_operands_vanish() -> None:
    toy = make(None)
    for bias in (True, False):
        got = toy(operands(bias=bias), Params(2.0), implementation="auto")
        want = np.arange(6).reshape(3, 2) * 2.0 + (0.5 if bias else 0.0)
        np.testing.assert_array_equal(got.y, want)
        jitted = jax.jit(lambda o: toy(o, Params(2.0), implementation="auto"))
        np.testing.assert_array_equal(jitted(operands(bias=bias)).y, want)


def test_cuda_lowering_names_target_attributes_alias_and_workspace(no_gpu: None) -> None:
    text = lower(make(KERNEL), "auto", ("cuda",))
    call = next(line for line in text.splitlines() if "jax_hpc.toy.v1" in line)
    assert "stablehlo.custom_call @jax_hpc.toy.v1" in call
    assert "factor = 2.000000e+00 : f32" in call
    assert re.search(r"output_tuple_indices = \[1\],\s+operand_index = 2", call), call
    assert call.rstrip().endswith("(tensor<3x2xf32>, tensor<4x2xf32>, tensor<3x7xi32>)"), call


class Caches(NamedTuple):
    scale: jax.Array
    k: Any
    v: Any


def test_each_of_two_equal_caches_is_written_in_its_own_place(no_gpu: None) -> None:
    """JAX may give operands of equal type one type object: aliases go by place."""
    kernel = Kernel(
        "jax_hpc.pair.v1",
        unsupported=lambda *_: None,
        attributes=lambda *_: {},
        inputs=lambda o: (o.v, o.k, o.scale),
        aliases={"k": "k", "v": "v"},
    )
    pair = Operator(
        "pair",
        shape_rule=lambda o, _: Caches(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in o)),
        reference=lambda o, _: o,
        kernel=kernel,
        gradient="use jnp",
    )
    given = Caches(jnp.zeros(()), jnp.zeros((4, 2)), jnp.ones((4, 2)))
    traced = jax.jit(lambda o: pair(o, Params(1.0), implementation="auto")).trace(given)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    aliases = re.findall(
        r"output_tuple_indices = \[(\d)\],\s+operand_index = (\d)", text.replace("\n", " ")
    )
    # The handler takes v, k, scale; the results are scale, k, v.
    assert set(aliases) == {("1", "1"), ("2", "0")}, text


def test_both_platforms_in_one_program(no_gpu: None) -> None:
    text = lower(make(KERNEL), "auto", ("cpu", "cuda"))
    assert text.count("@jax_hpc.toy.v1") == 1
    assert "stablehlo.case" in text


def test_xla_never_takes_the_kernel_and_never_warns(no_gpu: None) -> None:
    assert "custom_call @jax_hpc" not in lower(make(KERNEL), "xla", ("cuda",))


def test_fallback_on_cuda_is_announced_once(no_gpu: None) -> None:
    toy = make(KERNEL)
    with pytest.warns(FallbackWarning, match="toy runs on its XLA form.*x must be bf16"):
        text = lower(toy, "auto", ("cuda",), dtype=jnp.float32)
    assert "custom_call @jax_hpc" not in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower(toy, "auto", ("cuda",), dtype=jnp.float32)


def test_status_names_what_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "gpus", lambda: ("a GPU",))
    monkeypatch.setattr(_registry, "unusable_reason", lambda: None)
    assert _registry.kernel_status(make(KERNEL)) == "CUDA kernel"
    monkeypatch.setattr(_registry, "unusable_reason", lambda: "no Hopper GPU")
    assert _registry.kernel_status(make(KERNEL)) == "XLA form (no Hopper GPU)"


@pytest.mark.parametrize("is_preferred", [False, True])
def test_auto_takes_the_form_measured_to_be_faster(no_gpu: None, is_preferred: bool) -> None:
    """Silently: the XLA form is no fallback there."""
    toy = make(dataclasses.replace(KERNEL, preferred=lambda *_: is_preferred))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = lower(toy, "auto", ("cuda",))
    assert ("custom_call @jax_hpc" in text) is is_preferred
    assert "custom_call @jax_hpc.toy.v1" in lower(toy, "cuda", ("cuda",))


def test_no_warning_where_there_is_no_gpu(no_gpu: None) -> None:
    assert "custom_call" not in lower(make(KERNEL), "auto", ("cpu",))


@pytest.mark.parametrize(
    ("kernel", "dtype", "words"),
    [
        (None, jnp.bfloat16, "toy: no CUDA kernel for this call: jax_hpc .* has none"),
        (KERNEL, jnp.float32, "toy: no CUDA kernel for this call: x must be bf16"),
    ],
)
def test_cuda_without_a_kernel_raises(
    no_gpu: None, kernel: Kernel | None, dtype: Any, words: str
) -> None:
    with pytest.raises(NotImplementedError, match=words):
        make(kernel)(operands(dtype), Params(2.0), implementation="cuda")


def test_cuda_on_another_platform_raises(no_gpu: None) -> None:
    with pytest.raises(NotImplementedError, match="toy: implementation='cuda' needs.*for cpu"):
        lower(make(KERNEL), "cuda", ("cpu",))


def test_unknown_implementation() -> None:
    with pytest.raises(ValueError, match="toy: argument 'implementation' must be one of 'auto'"):
        make(None)(operands(), Params(2.0), implementation="gpu")


def test_kernel_on_a_sharded_program_is_refused(no_gpu: None) -> None:
    toy = make(KERNEL)
    mesh = host_mesh()

    def call(o: Operands) -> Results:
        return toy(o, Params(2.0), implementation="auto")

    x = jnp.zeros((4, 2), jnp.bfloat16)
    given = Operands(x, None, jnp.zeros((4, 2)))
    rows = jax.sharding.NamedSharding(mesh, P("t"))
    sharded = jax.jit(call, in_shardings=(Operands(rows, None, rows),))
    with pytest.raises(ValueError, match="toy: .*partitioned over 4 devices.*shard_map"):
        sharded.trace(given).lower(lowering_platforms=("cuda",))
    spec = Operands(P("t"), None, P("t"))
    manual = jax.shard_map(call, mesh=mesh, in_specs=(spec,), out_specs=Results(P("t"), P("t")))
    text = jax.jit(manual).trace(given).lower(lowering_platforms=("cuda",)).as_text()
    assert "@jax_hpc.toy.v1" in text
    assert "all_gather" not in text


def test_gradient_gives_advice() -> None:
    toy = make(None)

    def loss(x: jax.Array) -> jax.Array:
        return toy(operands()._replace(x=x), Params(2.0), implementation="auto").y.sum()

    with pytest.raises(NotImplementedError, match="toy cannot be differentiated: use jnp"):
        jax.grad(loss)(jnp.zeros((3, 2)))


def test_vmap_folds_or_names_the_argument() -> None:
    toy = make(None, Fold(frozenset({"x", "bias"}), frozenset({"y"})))

    def call(x: jax.Array, pages: jax.Array) -> jax.Array:
        return toy(Operands(x, None, pages), Params(2.0), implementation="auto").y

    x = jnp.arange(24, dtype=jnp.float32).reshape(3, 2, 4)
    got = jax.vmap(call, in_axes=(2, None))(x, jnp.zeros((4, 2)))
    np.testing.assert_array_equal(got, np.moveaxis(np.asarray(x), 2, 0) * 2)
    assert jax.vmap(call, in_axes=(2, None))(x[:0], jnp.zeros((4, 2))).shape == (4, 0, 2)
    with pytest.raises(NotImplementedError, match="toy: vmap over argument 'pages'.*bias, x may"):
        jax.vmap(call, in_axes=(None, 0))(x[..., 0], jnp.zeros((5, 4, 2)))
    refusing = make(None)
    with pytest.raises(NotImplementedError, match=r"toy: vmap is not supported .*'x'"):
        jax.vmap(
            lambda x: refusing(operands()._replace(x=x), Params(2.0), implementation="xla").y
        )(jnp.zeros((5, 3, 2)))


def test_layers_of_equal_shapes_share_one_function() -> None:
    toy = make(None)

    def layers(o: Operands) -> jax.Array:
        for _ in range(3):
            y, _ = toy(o, Params(2.0), implementation="xla")
            o = o._replace(x=y)
        return o.x

    text = jax.jit(layers).lower(operands(jnp.float32)).as_text()
    assert text.count("func.func private @toy") == 1
    assert text.count("call @toy") == 3


@pytest.mark.parametrize(
    ("built", "running", "fails"),
    [
        ((0, 4), (0, 4), False),
        ((0, 4), (0, 5), False),
        ((0, 5), (0, 4), True),
        ((1, 0), (0, 4), True),
    ],
)
def test_ffi_version_gate(
    monkeypatch: pytest.MonkeyPatch, built: tuple[int, int], running: tuple[int, int], fails: bool
) -> None:
    class Extension:
        @staticmethod
        def build_info() -> dict[str, int]:
            return {"xla_ffi_major": built[0], "xla_ffi_minor": built[1]}

        @staticmethod
        def registrations() -> dict[str, Any]:
            return {}

    monkeypatch.setattr(_registry, "extension", lambda: Extension)
    monkeypatch.setattr(_registry, "_running_ffi_version", lambda: running)
    register = _registry.register_targets.__wrapped__
    if fails:
        with pytest.raises(ImportError, match=f"built for XLA FFI {built[0]}.{built[1]}.*has 0.4"):
            register()
    else:
        register()
