"""Every operator under every transformation a user may apply to it."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_hpc
from jax_hpc import _primitive, _registry
from tests.support.meshes import host_mesh
from tests.support.numerics import assert_bitwise
from tests.support.operator_calls import MAKERS, Call


@pytest.fixture(params=sorted(MAKERS))
def call(request: pytest.FixtureRequest, rng: np.random.Generator) -> Call:
    return MAKERS[request.param](rng)


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_bitwise(a, b)


def assert_near(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_list_is_complete() -> None:
    assert set(MAKERS) == set(_registry.OPERATORS)


def test_control_flow_gives_what_eager_gives(call: Call) -> None:
    """jit, scan, while_loop and cond in one program (one compilation)."""

    @jax.jit
    def everything(x: jax.Array, rest: Any) -> Any:
        plain = call.run(x, rest)
        _, scanned = jax.lax.scan(lambda c, _: (c, call.run(x, rest)), 0, None, length=2)

        def body(carry: Any) -> Any:
            step, _ = carry
            return step + 1, call.run(x, rest)

        _, looped = jax.lax.while_loop(
            lambda c: (c[0] < 1) & (x.ravel()[0] < 10_000), body, (0, plain)
        )
        chosen = jax.lax.cond(
            x.ravel()[0] < 10_000,
            lambda: call.run(x, rest),
            lambda: jax.tree.map(jnp.zeros_like, plain),
        )
        return plain, jax.tree.map(lambda a: a[1], scanned), looped, chosen

    eager = call.run(call.x, call.rest)
    for result in everything(call.x, call.rest):
        assert_near(result, eager)


def test_runs_are_bitwise_repeatable(call: Call) -> None:
    run = jax.jit(call.run)
    assert_same(run(call.x, call.rest), run(call.x, call.rest))


def test_shard_map_splits_into_independent_parts(call: Call) -> None:
    """Four devices give what one does; a schedule is per device."""
    mesh = host_mesh()
    specs = (call.x_spec, call.rest_spec)
    # The host devices' results against a host device's: a GPU rounds otherwise.
    with jax.default_device(jax.devices("cpu")[0]):
        want = _one_device(call)
    x, rest = jax.tree.map(np.asarray, (call.x, call.rest))
    for check_vma in (True, False):
        sharded = jax.shard_map(
            call.run, mesh=mesh, in_specs=specs, out_specs=call.out_spec, check_vma=check_vma
        )
        assert_near(jax.jit(sharded)(x, rest), want)


def _one_device(call: Call) -> Any:
    """What the parts give one by one, on the default device."""
    x, rest = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, (call.x, call.rest)))
    if call.name == "decode_schedule":
        parts = [call.run(part, ()) for part in jnp.split(x, 4)]
        return [jnp.concatenate(leaf) for leaf in zip(*parts, strict=True)]
    if call.name == "qk_norm_rope_append":
        return _by_rank(dataclasses.replace(call, x=x, rest=rest))
    return call.run(x, rest)


def _by_rank(call: Call) -> Any:
    """The prologue takes one rank's q, k and v rows side by side: run by rank, join heads."""
    parts = []
    for rank in range(4):
        width = call.x.shape[1] // 4
        pages = [cache[:, rank : rank + 1] for cache in call.rest[5:]]
        parts.append(
            call.run(call.x[:, rank * width : (rank + 1) * width], (*call.rest[:5], *pages))
        )
    return [jnp.concatenate(leaf, axis=1) for leaf in zip(*parts, strict=True)]


def test_automatic_sharding_of_the_xla_form(call: Call) -> None:
    """Outside shard_map XLA partitions the jax.numpy form by itself."""
    mesh = host_mesh()
    if call.name == "qk_norm_rope_append":
        x = jax.device_put(call.x, NamedSharding(mesh, P()))
    else:
        x = jax.device_put(call.x, NamedSharding(mesh, call.x_spec))
    assert_near(jax.jit(call.run)(x, call.rest), call.run(call.x, call.rest))


def test_explicitly_sharded_operands(call: Call) -> None:
    """On a mesh of explicit axes, jax.make_mesh's default, XLA partitions the form as well."""
    mesh = host_mesh(axis_type=AxisType.Explicit)
    spec = P() if call.name == "qk_norm_rope_append" else call.x_spec
    with jax.default_device(jax.devices("cpu")[0]):
        want = _plain(call)
    x, rest = jax.tree.map(np.asarray, (call.x, call.rest))
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, spec))
        got = jax.jit(call.run)(x, rest)
        assert_near(got, want)
    for leaf in jax.tree.leaves(got):
        assert jax.typeof(leaf).sharding.spec == P(*[None] * leaf.ndim)


def _plain(call: Call) -> Any:
    return call.run(*jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, (call.x, call.rest))))


def test_results_are_the_same_with_64_bit_types(call: Call) -> None:
    """jax_enable_x64 changes the type of Python numbers and of counts, not of the results."""
    want = jax.jit(call.run)(call.x, call.rest)
    with jax.enable_x64(True):
        got = jax.jit(call.run)(call.x, call.rest)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_flax_parameters_are_arrays(call: Call) -> None:
    """A module may pass its nnx.Param as it is."""
    assert_near(call.run(nnx.Param(call.x), call.rest), call.run(call.x, call.rest))


def test_export_round_trip(call: Call) -> None:
    leaves, tree = jax.tree.flatten((call.x, call.rest))

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(call.run(*jax.tree.unflatten(tree, leaves)))

    exported = jax.export.export(jax.jit(flat), platforms=["cpu"])(*leaves)
    again = jax.export.deserialize(exported.serialize())
    if jax.default_backend() == "cpu":
        assert_near(again.call(*leaves), jax.jit(flat)(*leaves))
    assert again.platforms == ("cpu",)


def test_gradient_is_refused_with_advice(call: Call) -> None:
    def loss(x: jax.Array) -> jax.Array:
        return sum(
            jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(call.run(x, call.rest))
        )

    if not call.float_x:
        with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
            jax.grad(loss)(call.x)
        return
    with pytest.raises(NotImplementedError, match=f"{call.name} cannot be differentiated: ."):
        jax.grad(loss)(call.x)


def test_implementations(call: Call) -> None:
    assert_near(call.run(call.x, call.rest, "xla"), call.run(call.x, call.rest))
    operator = _registry.OPERATORS[call.name]
    if operator.kernel is None:
        with pytest.raises(
            NotImplementedError, match=f"{call.name}: no CUDA kernel for this call"
        ):
            call.run(call.x, call.rest, "cuda")
    with pytest.raises(ValueError, match=f"{call.name}: argument 'implementation' must be one of"):
        call.run(call.x, call.rest, "fast")


def test_fallback_on_a_gpu_is_announced(call: Call) -> None:
    """Lowered for cuda without a kernel that takes it (float32 has none): one warning by name."""
    takes_all = ("decode_schedule", "route_topk")  # their operands have one dtype
    if call.name in takes_all and _registry.OPERATORS[call.name].kernel is not None:
        return
    _primitive._WARNED.clear()

    def lower(implementation: str) -> None:
        run = jax.jit(lambda x, rest: call.run(x, rest, implementation))
        run.trace(call.x, call.rest).lower(lowering_platforms=("cuda",))

    with pytest.warns(jax_hpc.FallbackWarning, match=f"^{call.name} runs on its XLA form"):
        lower("auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower("auto")
        lower("xla")


def test_info_lists_every_operator() -> None:
    info = jax_hpc.info()
    assert set(info["operators"]) == set(MAKERS)
    assert info["version"] == jax_hpc.__version__
    assert all(info["operators"].values())
