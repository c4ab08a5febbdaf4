"""Sampling: its distribution, its penalties, and what a batch must not do to a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jax_hpc import sampling
from jax_hpc.sampling import SamplingParams, TokenCounts, sample, update_counts
from tests.support.meshes import host_mesh
from tests.support.numerics import assert_bitwise, assert_close
from tests.support.token_logits import B, V, allowed, logits_of

MANY, FEW = 8000, 20  # rows and tokens of the statistical tests: one compilation
jitted = jax.jit(sample)


def keys(rng, batch=B):
    seeds = rng.integers(0, 2**32, batch, dtype=np.uint32)
    return jnp.asarray(seeds), jnp.asarray(rng.integers(0, 10_000, batch, dtype=np.int32))


def test_greedy_takes_the_largest_logit_and_the_lower_of_equals(rng):
    logits = rng.uniform(-9, -3, (B, V)).astype(np.float32)
    logits[0, [5, 7, 900]] = 2.0
    logits[1, :9] = np.nan
    logits[1, 11] = -1.0
    logits[2], logits[3] = -np.inf, np.nan
    logits[4, [6, 8]] = np.inf
    logits[5, V - 1] = 0.0
    tokens = jitted(jnp.asarray(logits), SamplingParams.greedy(B), *keys(rng))
    assert tokens.dtype == jnp.int32
    assert np.asarray(tokens)[:6].tolist() == [5, 11, 0, 0, 6, V - 1]


def test_odd_rows_are_sampled_without_touching_their_neighbours(rng):
    logits = logits_of(rng)
    seeds, positions = keys(rng)
    params = SamplingParams.create(B, top_k=20, top_p=0.9, min_p=0.01)
    clean = np.asarray(jitted(jnp.asarray(logits), params, seeds, positions))
    logits[1], logits[3], logits[5, :] = np.nan, -np.inf, [np.nan, np.inf] + [0.0] * (V - 2)
    dirty = np.asarray(jitted(jnp.asarray(logits), params, seeds, positions))
    assert dirty[[1, 3, 5]].tolist() == [0, 0, 1]
    others = [0, 2, 4, 6, 7]
    assert dirty[others].tolist() == clean[others].tolist()


def test_tiny_temperatures_are_the_limit_of_greedy(rng):
    logits = jnp.asarray(rng.standard_normal((B, V)).astype(np.float32) * 100)
    params = SamplingParams.create(B, temperature=[1e-38, 1e-20, 1e-6, 1e-5] * 2)
    assert_bitwise(jitted(logits, params, *keys(rng)), jnp.argmax(logits, -1).astype(jnp.int32))


def test_drawn_frequencies_follow_the_softmax(rng):
    logits = (rng.standard_normal(FEW) * 1.5).astype(np.float32)
    seeds = jnp.arange(MANY, dtype=jnp.uint32)
    params = SamplingParams.create(MANY, temperature=1.3)
    tokens = jitted(same_row(logits), params, seeds, jnp.zeros(MANY, jnp.int32))
    seen = np.bincount(np.asarray(tokens), minlength=FEW)
    expected = np.exp(logits.astype(np.float64) / 1.3)
    assert_plausible(seen, MANY * expected / expected.sum())


def test_positions_of_one_seed_draw_independently():
    """Pairs of tokens at neighbouring positions fill the square evenly."""
    seeds, positions = jnp.full(MANY, 7, jnp.uint32), jnp.arange(MANY, dtype=jnp.int32)
    draw = jitted(
        same_row(np.zeros(FEW, np.float32)), SamplingParams.create(MANY), seeds, positions
    )
    tokens = np.asarray(draw)
    pairs = np.bincount(tokens[:-1] * FEW + tokens[1:], minlength=FEW**2)
    assert_plausible(pairs, np.full(FEW**2, (MANY - 1) / FEW**2))


def same_row(logits):
    return jnp.asarray(np.broadcast_to(logits, (MANY, FEW)))


def assert_plausible(seen, expected):
    """Chi-square within six of its standard deviations."""
    chi_square = np.sum((seen - expected) ** 2 / expected)
    freedom = len(seen) - 1
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom), f"chi-square {chi_square:.1f}: {seen}"


def test_filtered_draws_reach_all_of_the_kept_set_and_nothing_else(rng):
    logits = same_row(logits_of(rng, batch=1, vocab=FEW))
    params = SamplingParams.create(MANY, temperature=2.0, top_k=9, top_p=0.95)
    kept = np.nonzero(np.asarray(allowed(logits, params))[0])[0]
    seeds = jnp.arange(MANY, dtype=jnp.uint32)
    tokens = jitted(logits, params, seeds, jnp.zeros(MANY, jnp.int32))
    assert 3 < len(kept) < FEW
    assert sorted(set(np.asarray(tokens).tolist())) == kept.tolist()


def test_a_row_draws_the_same_token_in_any_batch(rng):
    logits = logits_of(rng)
    seeds, positions = keys(rng)
    params = SamplingParams.create(
        B,
        temperature=[0.7, 1.0, 0.0, 1.5, 1.0, 0.9, 2.0, 1.0],
        top_k=[0, 40, 0, 9, 0, 300, 5000, 0],
        top_p=[0.9, 1.0, 1.0, 0.5, 0.99, 0.8, 1.0, 1.0],
        min_p=[0, 0, 0, 0.1, 0, 0.02, 0, 0.3],
    )

    def rows(index):
        """The rows of these indices as a batch of their own."""
        batch = (logits, params, seeds, positions)
        return jitted(*jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[index]), batch))

    together = np.asarray(rows(np.arange(B)))
    order = rng.permutation(B)
    assert np.asarray(rows(order)).tolist() == together[order].tolist()
    for row in range(B):
        assert np.asarray(rows(np.asarray([row]))).tolist() == [together[row]], f"row {row} alone"
    crowd = np.concatenate([order, rng.integers(0, B, 29)])
    assert np.asarray(rows(crowd)).tolist() == together[crowd].tolist()


def test_penalties_are_those_of_hugging_face_and_openai(rng):
    logits = rng.standard_normal((B, V)).astype(np.float32) * 4
    repetition = rng.uniform(0.5, 2, B).astype(np.float32)
    frequency = rng.uniform(-1, 1, B).astype(np.float32)
    presence = rng.uniform(-1, 1, B).astype(np.float32)
    prompt = rng.random((B, V)) < 0.3
    output = rng.integers(-3, 4, (B, V)).clip(0).astype(np.int32)
    params = SamplingParams.create(
        B,
        temperature=0.0,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    counts = TokenCounts(jnp.asarray(prompt), jnp.asarray(output))
    want = logits.astype(np.float64)
    for row, token in np.ndindex(*want.shape):
        if prompt[row, token] or output[row, token]:
            factor = np.float64(repetition[row])
            want[row, token] *= factor if want[row, token] < 0 else 1 / factor
        want[row, token] -= frequency[row] * np.float64(output[row, token])
        want[row, token] -= presence[row] if output[row, token] else 0
    penalise = jax.jit(sampling._penalise)
    assert_close(penalise(jnp.asarray(logits), params, counts), want, atol=1e-5)
    tokens = jitted(jnp.asarray(logits), params, *keys(rng), counts)
    assert np.asarray(tokens).tolist() == np.argmax(want, -1).tolist()
    assert params.uses_penalties() and not SamplingParams.greedy(2).uses_penalties()


def test_counts_of_prompts_and_outputs():
    counts = TokenCounts.from_prompts([[1, 1, 4], [], [0]], 5)
    assert np.asarray(counts.prompt).astype(int).tolist() == [
        [0, 1, 0, 0, 1],
        [0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
    ]
    step = jax.jit(update_counts)
    active = jnp.asarray([True, False, True])
    counts = step(counts, jnp.asarray([2, 2, 4]), active)
    counts = step(counts, jnp.asarray([2, 3, -1]), active)
    counts = step(counts, jnp.asarray([9, 3, 5]), active)  # past the end: not counted
    assert counts.output.tolist() == [[0, 0, 2, 0, 0], [0] * 5, [0, 0, 0, 0, 1]]
    assert TokenCounts.zeros(3, 5).output.dtype == jnp.int32
    with pytest.raises(ValueError, match=r"prompts\[1\] must hold token ids in \[0, 5\), got 5"):
        TokenCounts.from_prompts([[0], [4, 5]], 5)


def test_loops_give_what_single_steps_give(rng):
    logits = jnp.asarray(logits_of(rng))
    seeds, start = keys(rng)
    params = SamplingParams.create(B, top_k=30, top_p=0.9, frequency_penalty=0.7)
    everyone = jnp.ones(B, bool)

    def step(carry, _):
        positions, counts = carry
        tokens = sample(logits, params, seeds, positions, counts)
        return (positions + 1, update_counts(counts, tokens, everyone)), tokens

    def body(state):  # two steps by scan in each turn of a while_loop
        carry, tokens, i = state
        carry, pair = lax.scan(step, carry, length=2)
        return carry, lax.dynamic_update_slice_in_dim(tokens, pair, i, axis=0), i + 2

    @jax.jit
    def loop(carry):
        empty = jnp.zeros((4, B), jnp.int32)
        return lax.while_loop(lambda s: s[2] < 4, body, (carry, empty, 0))[1]

    positions, counts = start, TokenCounts.zeros(B, V)
    looped = loop((positions, counts))
    update = jax.jit(update_counts)
    for i in range(4):
        tokens = jitted(logits, params, seeds, positions, counts)
        assert_bitwise(looped[i], tokens)
        positions, counts = positions + 1, update(counts, tokens, everyone)


def test_sharded_batches_draw_what_one_device_draws(rng):
    logits = jnp.asarray(logits_of(rng))
    seeds, positions = keys(rng)
    params = SamplingParams.create(B, top_k=30, top_p=0.8, temperature=[0.0, 1.0] * (B // 2))
    whole = jitted(logits, params, seeds, positions)
    mesh = host_mesh(4, "data")
    rows = PartitionSpec("data")
    spread = jax.shard_map(sample, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows)
    assert_bitwise(jax.jit(spread)(logits, params, seeds, positions), whole)


def argument_avals():
    row = lambda dtype: jax.ShapeDtypeStruct((B,), dtype)  # noqa: E731
    params = jax.eval_shape(lambda: SamplingParams.create(B))
    return jax.ShapeDtypeStruct((B, V), jnp.float32), params, row(jnp.uint32), row(jnp.int32)


def test_nothing_sorts_and_no_loop_keeps_a_cond_out_of_a_cuda_graph():
    counts = jax.eval_shape(lambda: TokenCounts.zeros(B, V))
    lowered = jitted.trace(*argument_avals(), counts).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.case" in lowered
    assert "stablehlo.sort" not in lowered and "stablehlo.while" not in lowered
    compiled = jitted.lower(*argument_avals()).compile().as_text()
    assert " sort(" not in compiled


def test_an_all_greedy_batch_draws_no_noise():
    outer = jax.make_jaxpr(sample)(*argument_avals()).jaxpr
    (choice,) = [e for e in outer.eqns if e.primitive.name == "cond"]
    drawing, greedy = choice.params["branches"]  # False, True
    assert len(greedy.jaxpr.eqns) == 0
    assert "random_bits" in str(drawing)
    assert "random_bits" not in "".join(str(e) for e in outer.eqns if e is not choice)


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("temperature", -0.1, ">= 0, got -0.1"),
        ("temperature", [0.5, np.nan], ">= 0, got nan"),
        ("temperature", np.inf, ">= 0, got inf"),
        ("top_k", -1, r"in \[0, 2\^31\), got -1"),
        ("top_p", 0.0, r"in \(0, 1\], got 0.0"),
        ("top_p", 1.5, r"in \(0, 1\], got 1.5"),
        ("min_p", 1.0, r"in \[0, 1\), got 1.0"),
        ("min_p", -0.5, r"in \[0, 1\), got -0.5"),
        ("repetition_penalty", 0, "> 0, got 0"),
        ("frequency_penalty", np.inf, "finite, got inf"),
        ("presence_penalty", np.nan, "finite, got nan"),
        ("top_p", [0.5, 0.5, 0.5], r"one value or 2 values, got shape \(3,\)"),
    ],
)
def test_settings_outside_their_range_are_named(argument, value, expected):
    with pytest.raises(ValueError, match=f"'{argument}' must be {expected}"):
        SamplingParams.create(2, **{argument: value})


def test_wrong_types_and_shapes_are_named():
    with pytest.raises(TypeError, match="'temperature' must be a number, got 'hot'"):
        SamplingParams.create(2, temperature="hot")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="'top_k' must be in .*, got 4294967296"):
        SamplingParams.create(2, top_k=2**32)
    with pytest.raises(TypeError, match="'top_k' must be an integer, got 1.5"):
        SamplingParams.create(2, top_k=1.5)
    params, rows = SamplingParams.greedy(2), jnp.zeros(2, jnp.int32)
    logits = jnp.zeros((2, 5))
    with pytest.raises(TypeError, match="'logits' must be float32, got bfloat16"):
        sample(logits.astype(jnp.bfloat16), params, rows.astype(jnp.uint32), rows)
    with pytest.raises(TypeError, match="'seeds' must be uint32, got int32"):
        sample(logits, params, rows, rows)
    with pytest.raises(ValueError, match="'params.temperature' must have shape"):
        sample(logits, SamplingParams.greedy(3), rows.astype(jnp.uint32), rows)
    with pytest.raises(ValueError, match="'counts.prompt' must have shape"):
        sample(logits, params, rows.astype(jnp.uint32), rows, TokenCounts.zeros(2, 6))
    with pytest.raises(ValueError, match="V >= 1"):
        sample(logits[:, :0], params, rows.astype(jnp.uint32), rows)
