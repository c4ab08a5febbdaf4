"""What every kernel's call launches, alone and in a decode-like loop, and on which addresses.

Holds for each path of each operator that has a kernel; see ``operator_calls.kernel_makers``.

A run of a loop has one cost of its own: XLA copies the number of the first step, four bytes, to
where the loop counts. It is no argument, so that no donation prevents it. It is the same for any
number of steps, and the only copy that these tests allow. The carry is donated, as in any decode
loop: else XLA copies all of it before the first step.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks import timing
from tests.support.driver_calls import DriverCalls, driver_calls
from tests.support.numerics import assert_bitwise
from tests.support.operator_calls import Call, kernel_makers

pytestmark = pytest.mark.gpu

COUNTER = 4  # bytes of a loop's counter
LAYERS = 6  # XLA makes a graph of five commands or more
ATTEMPTS = 3  # a poll in each step shows every time, one that came with time does not


@pytest.fixture(params=sorted(kernel_makers()))
def call(request: pytest.FixtureRequest, rng: np.random.Generator) -> Call:
    return kernel_makers()[request.param](rng)


@pytest.fixture
def pure(call: Call) -> Call:
    if call.in_place:
        pytest.skip("it writes into a donated operand: its own tests count its launches")
    return call


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

    def __init__(self, call: Call, steps: int, layers: list[Any]) -> None:
        def one(operands: Any, state: Any) -> Any:
            return call.run(*operands), state

        workload = timing.Workload(lambda _: (layers[0], ()), one, 1)
        self._first = lambda: timing.first_carry(workload, layers, [()] * LAYERS)
        jitted = jax.jit(timing.looped(one, steps), donate_argnums=1)
        self._compiled = jitted.lower(layers, self._first()).compile()
        timing.check_loop(self._compiled)

    def carry(self) -> Any:
        """A fresh carry; ``__call__`` is given it and takes its buffers."""
        return jax.block_until_ready(self._first())

    def __call__(self, layers: list[Any], carry: Any) -> Any:
        return jax.block_until_ready(self._compiled(layers, carry))


def kernels_of_a_step(call: Call) -> int:
    return LAYERS * call.launches


def sizes(moves: list[tuple[str, int | None]]) -> list[int | None]:
    return [size for _, size in moves]


def calls_of(run: Any, *operands: Any) -> DriverCalls:
    """Driver calls of a jitted call that ran before."""
    jitted = jax.jit(run)
    jax.block_until_ready(jitted(*operands))
    with driver_calls() as calls:
        jax.block_until_ready(jitted(*operands))
    return calls


def test_driver_calls_show_copies_and_kernels() -> None:
    """A kernel that is not ours, and a copy, are seen."""
    x = jnp.ones(5000)
    calls = calls_of(lambda x: (jnp.copy(x), x + 1), x)
    assert (calls.launches, len(calls.kernels), calls.ours) == (1, 1, 0), f"{calls}"
    assert sizes(calls.moves) == [x.nbytes], f"{calls}"


def test_kernels_of_one_call(pure: Call) -> None:
    """A jitted call launches so many kernels, all ours, and copies and fills nothing."""
    calls = calls_of(pure.run, pure.x, pure.rest)
    said = f"{calls}"
    assert (calls.launches, calls.ours, calls.graphs) == (pure.launches, pure.launches, 0), said
    assert not calls.moves, said


def calls_of_steady_state(loop: Loop, layers: list[Any]) -> DriverCalls:
    """Driver calls of a run whose graph is recorded: its carry is donated again and again."""
    carry = loop.carry()
    for _ in range(3):
        carry = loop(layers, carry)
    with driver_calls() as calls:
        loop(layers, carry)
    return calls


def test_a_step_is_one_graph_and_nothing_else(pure: Call) -> None:
    """Eight steps more are eight graph launches more, and no other call of the driver at all."""
    layers = layers_of(pure)
    loops = [Loop(pure, steps, layers) for steps in (4, 12)]
    for _ in range(ATTEMPTS):
        few, many = (calls_of_steady_state(loop, layers) for loop in loops)
        more = many.without_polls()
        more.subtract(few.without_polls())
        more = {name: difference for name, difference in more.items() if difference != 0}
        said = f"8 steps more: {more}\n4 steps: {few}\n12 steps: {many}"
        assert more == {"cuGraphLaunch": 8}, said
        if many.polls - few.polls < 8:
            break
    assert many.polls - few.polls < 8, f"as many polls more as steps, each time: {said}"
    assert (few.graphs, few.launches) == (4, 0), said
    assert sizes(few.moves) == sizes(many.moves) == [COUNTER], said


def assert_recorded(calls: DriverCalls, call: Call, graphs: int, said: str) -> None:
    """Each layer's kernels were captured once, and once more for a step that was no graph.

    That step shows every kernel of the graph, also XLA's own: one, which counts the step.
    """
    said, single_steps = f"{said}: {calls}", 4 - graphs
    assert calls.graphs == graphs, said
    assert calls.ours == (1 + single_steps) * kernels_of_a_step(call), said
    assert calls.launches - calls.ours <= single_steps, said
    # Nothing is copied or filled but the counter; a first run may also load XLA's constants.
    assert graphs < 4 or sizes(calls.moves) == [COUNTER], said
    assert not [name for name in calls if re.match("cuGraph.*(Mem|Host)", name)], said


def test_graphs_on_other_addresses(pure: Call) -> None:
    """Four steps on fresh buffers are four graphs, recorded anew; results are those of calls.

    In a first run XLA runs one step without a graph: it records a custom call only after that.
    """
    loop = Loop(pure, 4, layers_of(pure))
    kept, addresses = [], set()
    for turn in range(4):
        layers, carry = jax.block_until_ready(layers_of(pure, first=turn)), loop.carry()
        with driver_calls() as calls:
            _, results, _ = loop(layers, carry)
        assert_recorded(calls, pure, graphs=4 if turn else 3, said=f"turn {turn}")
        kept.append((layers, results))  # alive, so that the next turn's lie elsewhere
        addresses.add(jax.tree.leaves(layers)[0].unsafe_buffer_pointer())
        addresses.add(jax.tree.leaves(results)[0].unsafe_buffer_pointer())
    assert len(addresses) == 8, addresses
    for layers, results in kept:
        for (x, rest), result in zip(layers, results, strict=True):
            assert_same(result, pure.run(x, rest))


def test_the_second_gpu_gives_the_same_bits(call: Call, two_gpus: list[Any]) -> None:
    """Alone and in graphs, also where the first GPU ran the kernel before."""
    layers = layers_of(call)
    results = []
    for gpu in two_gpus:
        placed = jax.device_put(layers, gpu)
        alone = jax.jit(call.run)(*placed[0])
        with jax.default_device(gpu):
            loop = Loop(call, 4, placed)
            _, looped, _ = loop(placed, loop.carry())
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
