"""The one way in which every operator is timed.

A pass runs an operator once in each of several layers, as a model would: every layer has buffers
of its own, all together too large for the L2 cache, so that each call finds its weights, caches
and activations cold. Passes follow each other in one jitted ``fori_loop``, which a GPU runs as a
command buffer, as it does a decode loop.

No call overlaps with another, moves out of the loop or merges with its neighbours: each takes its
operands from an optimization barrier that also takes the results of the call before. A barrier
costs no kernel. XLA removes it only after it has scheduled the program, and commands of a command
buffer run in the order of the schedule. Results and caches are donated and carried, so that
their addresses stay and graphs are recorded once.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

COLD_BYTES = 200_000_000
"""Distinct bytes of a pass, several times the 60 MB of an H200's L2."""
MIN_LAYERS = 32
"""A model has many layers, and a pass has costs of its own: its graph's start, its counter."""
MOST_LAYERS = 128
"""XLA compiles every layer. Operands so small that these do not fill the L2 are not weights or
long caches, but what the step before has just written: they are in it in a model too."""
MOST_BYTES = 6_000_000_000
"""Of a pass, as the recorded peers' had several GB: with larger layers it has fewer of them. What
a pass takes costs time of its own: with 32 GB, as the weights and caches of a model may take,
large rows of decode and experts are 2 to 3 % slower than with 6, on the same device."""
FEWEST_LAYERS = 8
"""XLA makes a graph of five commands or more."""
MIN_PASSES = 2
"""XLA replaces a loop that runs once by its body."""
RUNS = 4
"""Runs of the loop in a repeat: but for the first, the host has started each before it is due."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """One operator call in a form that can be repeated over layers.

    make: key -> (operands, state) of one layer; traced, so that buffers are made on the device.
    call: (operands, state) -> (results, state). State is what the operator updates in place,
        such as caches; () where there is none.
    layer_bytes: distinct bytes that one call reads and writes.
    weights: key -> the last of the operands of one layer, the same function for all cases that
        may share them: a process makes them once.
    """

    make: Callable[[jax.Array], tuple[Any, Any]]
    call: Callable[[Any, Any], tuple[Any, Any]]
    layer_bytes: int
    weights: Callable[[jax.Array], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Median time of a call, the layers of a pass, the repeats that it is the median of.

    spent: seconds that making the operands, compiling and timing took.
    """

    us: float
    layers: int
    repeats: int
    spent: dict[str, float]


def num_layers(layer_bytes: int, cold_bytes: int = COLD_BYTES) -> int:
    wanted = min(max(MIN_LAYERS, math.ceil(cold_bytes / layer_bytes)), MOST_LAYERS)
    return max(FEWEST_LAYERS, min(wanted, MOST_BYTES // layer_bytes))


def looped(
    call: Callable[[Any, Any], tuple[Any, Any]], passes: int
) -> Callable[[Sequence[Any], Any], Any]:
    """(operands of each layer, carry) -> carry, after ``passes`` passes over all layers."""

    def one_pass(layers: Sequence[Any], carry: Any) -> Any:
        token, results, states = carry[0], list(carry[1]), list(carry[2])
        previous = token
        for layer, operands in enumerate(layers):
            operands, states[layer], previous = jax.lax.optimization_barrier(
                (operands, states[layer], previous)
            )
            # What leaves the barrier has to stay alive: XLA drops unused values from it, and
            # the order of the calls would go with them.
            if layer == 0:
                token = previous
            else:
                results[layer - 1] = previous
            previous, states[layer] = call(operands, states[layer])
        results[-1] = previous
        return token, results, states

    def run(layers: Sequence[Any], carry: Any) -> Any:
        return jax.lax.fori_loop(0, passes, lambda _, c: one_pass(layers, c), carry)

    return run


def keys_of_layers(seed: int, count: int) -> jax.Array:
    """Of the generator that compiles and runs fastest: making operands took half of a run."""
    return jax.random.split(jax.random.key(seed, impl="rbg"), count)


_kept: dict[tuple[Callable[[jax.Array], Any], int], list[Any]] = {}
MOST_KEPT = 2
"""Sets of weights that a process keeps: two formats of a layer take turns."""


def weights_of_layers(weights: Callable[[jax.Array], Any], count: int) -> list[Any]:
    """Weights of so many layers, made anew only where others were asked for meanwhile."""
    wanted = (weights, count)
    if wanted not in _kept:
        if len(_kept) == MOST_KEPT:  # before there are more: a set may be 45 GB
            del _kept[next(iter(_kept))]
        make = jax.jit(weights)
        _kept[wanted] = [make(key) for key in keys_of_layers(1, count)]
    return _kept[wanted]


def first_carry(workload: Workload, layers: Sequence[Any], states: Sequence[Any]) -> Any:
    results, _ = jax.eval_shape(workload.call, layers[0], states[0])
    zeros = [
        jax.tree.map(lambda r: jnp.zeros(r.shape, r.dtype), results) for _ in range(len(layers))
    ]
    return jnp.zeros((), jnp.int32), zeros, list(states)


def measure(
    workload: Workload,
    *,
    estimate_us: float,
    cold_bytes: int = COLD_BYTES,
    seconds: float = 0.1,
    repeat_seconds: float = 0.01,
    min_repeats: int = 3,
) -> Measurement:
    """Time one operator call.

    estimate_us: rough time of a call, at best a little too short; it sets how many passes the
        loop makes.
    cold_bytes: distinct bytes of a pass.
    seconds: repeat the loop for at least as long.
    repeat_seconds: rough length of one run of the loop; a repeat is four.
    """
    began = time.perf_counter()
    count = num_layers(workload.layer_bytes, cold_bytes)
    make = jax.jit(workload.make)
    made = [make(key) for key in keys_of_layers(0, count)]
    layers = [operands for operands, _ in made]
    if workload.weights is not None:
        weights = weights_of_layers(workload.weights, count)
        layers = [(*operands, last) for operands, last in zip(layers, weights, strict=True)]
    carry = jax.block_until_ready(first_carry(workload, layers, [s for _, s in made]))
    del made  # the states are donated
    made_at = time.perf_counter()
    passes = max(MIN_PASSES, math.ceil(repeat_seconds * 1e6 / (count * estimate_us)))
    loop = jax.jit(looped(workload.call, passes), donate_argnums=1)
    compiled = loop.lower(layers, carry).compile()
    check_loop(compiled)
    compiled_at = time.perf_counter()
    for _ in range(2):  # records the graph; clocks rise
        carry = jax.block_until_ready(compiled(layers, carry))
    times: list[float] = []
    while sum(times) < seconds or len(times) < min_repeats:
        start = time.perf_counter()
        for _ in range(RUNS):
            carry = compiled(layers, carry)
        jax.block_until_ready(carry)
        times.append(time.perf_counter() - start)
    check_results(carry[1])
    spent = {
        "making operands": made_at - began,
        "compiling": compiled_at - made_at,
        "timing": time.perf_counter() - compiled_at,
    }
    us = statistics.median(times) * 1e6 / (RUNS * passes * count)
    return Measurement(us, count, len(times), spent)


def check_loop(compiled: Any) -> None:
    """Raise if XLA took work out of the loop: what it took would not be measured."""
    text = compiled.as_text()
    entry = text[text.index("\nENTRY ") :]
    moved = [line.strip() for line in entry.splitlines() if any(f" {op}(" in line for op in _WORK)]
    if " while(" not in entry or moved:
        raise RuntimeError("work stands outside the timed loop:\n" + "\n".join(moved or [entry]))


_WORK = ("fusion", "dot", "convolution", "custom-call", "convert", "reduce", "scatter")


def check_results(results: Sequence[Any]) -> None:
    """Raise if an operator gave NaN, infinity or nothing but zeros: it did not do its work."""
    for leaf in jax.tree.leaves([results[0], results[-1]]):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            values = np.asarray(leaf, np.float32)
            if not (np.isfinite(values).all() and values.any()):
                raise RuntimeError("the timed operator gave NaN, infinities or only zeros")
