"""The timing of the benchmarks, on a CPU: every call in the loop, in order, and nothing else."""

import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import timing
from jax_hpc import profiling

LAYERS, TOKENS, HIDDEN, EXPERTS = 5, 16, 64, 32


def product(operands, state):
    x, weight = operands
    return jnp.einsum("th,eh->te", x, weight), state


def product_workload():
    def make(key):
        x_key, weight_key = jax.random.split(key)
        shapes = (TOKENS, HIDDEN), (EXPERTS, HIDDEN)
        return tuple(map(jax.random.normal, (x_key, weight_key), shapes)), ()

    size = 4 * (TOKENS * HIDDEN + EXPERTS * HIDDEN + TOKENS * EXPERTS)
    return timing.Workload(make, product, size)


def loop_and_operands(workload, passes=3):
    made = [workload.make(key) for key in jax.random.split(jax.random.key(1), LAYERS)]
    layers = [operands for operands, _ in made]
    carry = timing.first_carry(workload, layers, [state for _, state in made])
    return timing.looped(workload.call, passes), layers, carry


@pytest.fixture(scope="module")
def compiled_product():
    loop, layers, carry = loop_and_operands(product_workload())
    compiled = jax.jit(loop, donate_argnums=1).lower(layers, carry).compile()
    return compiled, layers, carry


def body_of(compiled):
    """Lines of the computation that the while loop repeats."""
    text = compiled.as_text()
    name = re.search(r" while\(.*body=%?([\w.\-]+)", text)[1]
    return re.search(rf"^%?{re.escape(name)} .*?^}}", text, re.M | re.S)[0].splitlines()


def test_every_call_stands_in_the_loop(compiled_product):
    compiled, _, _ = compiled_product
    timing.check_loop(compiled)
    assert compiled.as_text().count(" dot(") == LAYERS
    assert not profiling.loops_without_trip_count(compiled)


def test_calls_are_scheduled_in_order(compiled_product):
    compiled, _, _ = compiled_product
    body = body_of(compiled)
    kind = f"f32[{TOKENS},{EXPERTS}]"
    computed = [
        m[1]
        for line in body
        if (m := re.match(rf"\s*%?([\w.\-]+) = {re.escape(kind)}.* (?:fusion|dot)\(", line))
    ]
    root = next(line for line in body if "ROOT" in line)
    operands = re.findall(r"%([\w.\-]+)", root[root.rindex(" tuple(") :])
    assert len(computed) == LAYERS
    assert [name for name in operands if name in computed] == computed


def test_each_call_waits_for_the_one_before():
    loop, layers, carry = loop_and_operands(product_workload())
    (outer,) = [
        e
        for e in jax.make_jaxpr(loop)(layers, carry).eqns
        if e.primitive.name in ("scan", "while")
    ]
    body = outer.params.get("jaxpr", outer.params.get("body_jaxpr")).jaxpr
    origins, calls = {}, []
    for eqn in body.eqns:
        variables = [v for v in eqn.invars if not isinstance(v, jax.extend.core.Literal)]
        before = set().union(*(origins.get(v, set()) for v in variables))
        if eqn.primitive.name == "dot_general" or "einsum" in str(eqn.params.get("name")):
            assert before == set(calls)
            calls.append(len(calls))
            before = before | {calls[-1]}
        origins |= dict.fromkeys(eqn.outvars, before)
    assert len(calls) == LAYERS


def test_the_loop_gives_what_the_calls_give(compiled_product):
    compiled, layers, carry = compiled_product
    _, got, _ = compiled(layers, jax.tree.map(jnp.copy, carry))
    for operands, result in zip(layers, got, strict=True):
        np.testing.assert_allclose(result, product(operands, ())[0], rtol=1e-5, atol=1e-5)


def test_work_that_left_the_loop_is_found():
    weight = jnp.ones((HIDDEN, HIDDEN))

    def invariant(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: y + x @ weight, x)

    compiled = jax.jit(invariant).lower(weight).compile()
    with pytest.raises(RuntimeError, match="outside the timed loop"):
        timing.check_loop(compiled)


def test_state_is_updated_in_place():
    def make(key):
        return jax.random.normal(key, (4, 8)), jnp.zeros((64, 8))

    def call(row, cache):
        cache = cache.at[jnp.arange(4) * 7].set(row)
        return cache[:2].sum(axis=0), cache

    loop, layers, carry = loop_and_operands(timing.Workload(make, call, 1))
    compiled = jax.jit(loop, donate_argnums=1).lower(layers, carry).compile()
    assert profiling.cache_copies(compiled, carry[2]) == []
    _, _, states = compiled(layers, carry)
    for row, cache in zip(layers, states, strict=True):
        np.testing.assert_array_equal(cache[:22:7], row)


def test_layers_are_cold_and_many():
    assert timing.num_layers(3_154_688) == 64
    assert timing.num_layers(10**8) == timing.MIN_LAYERS == 32
    assert timing.num_layers(5 * 10**8) == 12
    assert timing.num_layers(10**9) == timing.FEWEST_LAYERS == 8


def test_tiny_operands_do_not_make_a_program_of_thousands_of_layers():
    assert timing.num_layers(900) == timing.MOST_LAYERS == 128


def test_measure():
    measured = timing.measure(
        product_workload(), estimate_us=5, cold_bytes=1, seconds=0.001, repeat_seconds=0.001
    )
    assert measured.layers == timing.MIN_LAYERS and measured.repeats >= 3
    assert set(measured.spent) == {"making operands", "compiling", "timing"}
    assert 0.05 < measured.us < 5000


def test_calls_longer_than_a_repeat_still_run_in_a_loop():
    timing.measure(
        product_workload(), estimate_us=1e6, cold_bytes=1, seconds=0.001, repeat_seconds=0.001
    )


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_an_operator_that_did_nothing_is_an_error(value):
    with pytest.raises(RuntimeError, match="NaN, infinities or only zeros"):
        timing.check_results([jnp.full((2, 2), value)])


def test_cases_that_share_weights_have_them_made_once() -> None:
    made = []

    def weights(key: jax.Array) -> jax.Array:
        made.append(key)  # traced once, whatever the number of layers
        return jax.random.normal(key, (EXPERTS, HIDDEN))

    for tokens in (2, 3):

        def make(key: jax.Array, tokens: int = tokens) -> tuple[tuple[jax.Array], tuple[()]]:
            return (jax.random.normal(key, (tokens, HIDDEN)),), ()

        workload = timing.Workload(make, product, 4 * EXPERTS * HIDDEN, weights)
        assert jax.eval_shape(workload.make, jax.random.key(0))[0][0].shape == (tokens, HIDDEN)
        measured = timing.measure(workload, estimate_us=50.0, cold_bytes=1, seconds=0.0)
        assert measured.us > 0 and measured.layers == timing.MIN_LAYERS
    assert len(made) == 1
