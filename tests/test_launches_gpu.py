"""What every kernel's call launches, alone and in a decode-like loop, and on which addresses.

Holds for each path of each operator that has a kernel; see ``operator_calls.kernel_makers``.
"""

import collections
import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks import timing
from jax_hpc import _registry
from tests.support.device_trace import device_trace
from tests.support.driver_calls import DriverCalls, driver_calls
from tests.support.numerics import assert_bitwise
from tests.support.operator_calls import Call, kernel_makers

pytestmark = pytest.mark.gpu

# Kernels of one call; one where nothing is said.
LAUNCHES = {"router_topk": 2}
# What must not come once a step: work, waits, and changes of the graph.
_WORK = re.compile("Launch|Mem|Synchronize|Graph|Capture")
LAYERS = 6  # XLA makes a graph of five commands or more


@pytest.fixture(params=sorted(kernel_makers()))
def call(request: pytest.FixtureRequest, rng: np.random.Generator) -> Call:
    return kernel_makers()[request.param](rng)


@pytest.fixture
def two_gpus() -> list[Any]:
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    if len(gpus) < 2:
        pytest.skip(f"needs two GPUs, this machine has {len(gpus)}")
    return gpus[:2]


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_bitwise(a, b)


def varied(call: Call, scale: float) -> Call:
    """The call with another x of the same shape; integers stay, as lengths and ids must."""
    if not call.float_x:
        return dataclasses.replace(call, x=jnp.copy(call.x))
    return dataclasses.replace(call, x=(call.x * scale).astype(call.x.dtype))


def layers_of(call: Call, first: int = 0) -> list[Any]:
    calls = [varied(call, 1 + (first + i) / 16) for i in range(LAYERS)]
    return [(layer.x, jax.tree.map(jnp.copy, layer.rest)) for layer in calls]


class Loop:
    """Steps over six layers, each call waiting for the one before, as the benchmarks run them."""

    def __init__(self, call: Call, steps: int, layers: list[Any], *, donate: bool = True) -> None:
        def one(operands: Any, state: Any) -> Any:
            return call.run(*operands), state

        workload = timing.Workload(lambda _: (layers[0], ()), one, 1)
        self._carry = lambda: timing.first_carry(workload, layers, [()] * LAYERS)
        looped = timing.looped(one, steps)
        jitted = jax.jit(looped, donate_argnums=1 if donate else ())
        self._compiled = jitted.lower(layers, self._carry()).compile()
        timing.check_loop(self._compiled)

    def __call__(self, layers: list[Any], carry: Any = None) -> Any:
        carry = self._carry() if carry is None else carry
        return jax.block_until_ready(self._compiled(layers, carry))


def calls_of_steady_state(loop: Loop, layers: list[Any]) -> DriverCalls:
    """Driver calls of a run whose graph is recorded: its carry is donated again and again."""
    carry = loop(layers)
    for _ in range(2):
        carry = loop(layers, carry)
    with driver_calls() as calls:
        loop(layers, carry)
    return calls


def test_a_step_is_one_graph_and_nothing_else(call: Call) -> None:
    """Eight steps more are eight graph launches more: no kernel, copy or wait of the host."""
    layers = layers_of(call)
    few, many = (calls_of_steady_state(Loop(call, steps, layers), layers) for steps in (4, 12))
    more = {name: many[name] - few[name] for name in many | few if many[name] != few[name]}
    said = f"4 steps: {dict(few)}\n8 more: {more}"
    assert more.pop("cuGraphLaunch", 0) == 8, said
    assert not [name for name in more if _WORK.search(name)], said
    assert (few.graphs, few.launches, few.moves) == (4, 0, 0), said


def test_a_graph_holds_one_capture_of_each_call(call: Call) -> None:
    """Recording the step launches each layer's kernels once, into the graph.

    XLA may run the first step before it records one.
    """
    layers = layers_of(call)
    loop = Loop(call, 4, layers)
    with driver_calls() as calls:
        loop(layers)
    ours = [name for name in calls.kernels if "jax_hpc" in name]
    said = f"{dict(calls)}\n{collections.Counter(calls.kernels)}"
    assert calls.graphs in (3, 4), said
    recorded_and_single = 1 + (4 - calls.graphs)
    assert len(ours) == recorded_and_single * LAYERS * LAUNCHES.get(call.name, 1), said


def test_graphs_on_other_addresses(call: Call) -> None:
    """One compiled loop on fresh buffers gives what the calls give, at every address."""
    loop = Loop(call, 4, layers_of(call), donate=False)
    kept, addresses = [], set()
    for turn in range(4):
        layers = layers_of(call, first=turn)
        with driver_calls() as calls:
            _, results, _ = loop(layers)
        assert calls.graphs in (3, 4), dict(calls)
        kept.append((layers, results))  # alive, so that the next turn's lie elsewhere
        addresses.add(jax.tree.leaves(layers)[0].unsafe_buffer_pointer())
        addresses.add(jax.tree.leaves(results)[0].unsafe_buffer_pointer())
    assert len(addresses) == 8, addresses
    for layers, results in kept:
        for (x, rest), result in zip(layers, results, strict=True):
            assert_same(result, call.run(x, rest))


def test_kernels_of_one_call(call: Call, tmp_path: Path) -> None:
    """A jitted call runs so many kernels, all ours, and copies nothing."""
    run = jax.jit(call.run)
    jax.block_until_ready(run(call.x, call.rest))
    trace = device_trace(lambda: run(call.x, call.rest), tmp_path)
    assert len(trace.ours) == LAUNCHES.get(call.name, 1), trace
    assert not trace.others and not trace.moves, trace


def test_kernels_of_a_loop(call: Call, tmp_path: Path) -> None:
    """A loop runs the kernels of its calls and one that counts its steps, and copies nothing."""
    steps, layers = 5, layers_of(call)
    loop = Loop(call, steps, layers)
    carry = loop(layers)
    trace = device_trace(lambda: loop(layers, carry), tmp_path)
    assert len(trace.ours) == steps * LAYERS * LAUNCHES.get(call.name, 1), trace
    assert len(trace.others) <= steps, trace
    assert not trace.moves, trace


def test_the_second_gpu_gives_the_same_bits(call: Call, two_gpus: list[Any]) -> None:
    """Alone and in graphs, also where the first GPU ran the kernel before."""
    layers = layers_of(call)
    results = []
    for gpu in two_gpus:
        placed = jax.device_put(layers, gpu)
        alone = jax.jit(call.run)(*placed[0])
        with jax.default_device(gpu):
            _, looped, _ = Loop(call, 4, placed)(placed)
        assert {leaf.device for leaf in jax.tree.leaves((alone, looped))} == {gpu}
        assert_same(looped[0], alone)
        results.append(looped)
    assert_same(results[1], results[0])


def test_shards_on_two_gpus(call: Call, two_gpus: list[Any]) -> None:
    """Under shard_map each GPU gives its part's bits, whichever GPU has the part."""
    results = []
    for gpus in (two_gpus, two_gpus[::-1]):
        mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Auto,), devices=gpus)
        specs = (call.x_spec, call.rest_spec)
        run = jax.shard_map(call.run, mesh=mesh, in_specs=specs, out_specs=call.out_spec)
        results.append(jax.jit(run)(*jax.tree.map(np.asarray, (call.x, call.rest))))
    assert_same(results[1], results[0])
    if (call.x_spec, call.rest_spec, call.out_spec) == (P("t"), P(), P("t")):
        half = call.x.shape[0] // 2
        parts = [call.run(call.x[:half], call.rest), call.run(call.x[half:], call.rest)]
        assert_same(results[0], jax.tree.map(lambda *p: jnp.concatenate(p), *parts))


def test_every_kernel_has_a_call() -> None:
    named = {name.partition(":")[0] for name in kernel_makers()}
    assert named == {name for name, op in _registry.OPERATORS.items() if op.kernel is not None}
    assert set(LAUNCHES) <= named
