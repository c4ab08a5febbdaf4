"""The benchmarks' own machinery, on a CPU: what is timed, what is kept, what is reported."""

import json
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import report, results, rows, runner, timing
from benchmarks.router import BENCHMARK, num_bytes
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


# Timing.


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


def test_layers_are_cold():
    assert timing.num_layers(3_154_688) == 64
    assert timing.num_layers(10**9) == timing.MIN_LAYERS


def test_measure():
    measured = timing.measure(
        product_workload(), estimate_us=5, cold_bytes=1, seconds=0.001, repeat_seconds=0.001
    )
    assert measured.layers == timing.MIN_LAYERS and measured.repeats >= 3
    assert 0.05 < measured.us < 5000


def test_calls_longer_than_a_repeat_still_run_in_a_loop():
    timing.measure(
        product_workload(), estimate_us=1e6, cold_bytes=1, seconds=0.001, repeat_seconds=0.001
    )


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_an_operator_that_did_nothing_is_an_error(value):
    with pytest.raises(RuntimeError, match="NaN, infinities or only zeros"):
        timing.check_results([jnp.full((2, 2), value)])


# Rows.


def test_router_floors_are_those_of_the_baselines():
    recorded = [r for r in results.read_rows(results.BASELINES) if r["op"] == "router"]
    assert len(recorded) > 100
    for row in recorded:
        ours = BENCHMARK.row(rows.case_of(row), "cuda")
        assert abs(ours["floor_us"] - row["floor_us"]) < 0.011, (row, ours)


def test_practical_floor_is_what_was_measured():
    for megabytes, tb_per_s in ((8, 1.44), (32, 2.85), (128, 3.9), (512, 4.4)):
        measured = megabytes / tb_per_s
        assert rows.practical_floor_us(megabytes * 1e6) == pytest.approx(measured, rel=0.05)


def test_bytes_of_a_router():
    case = {"shape": "qwen3", "m": 8}
    moved = 2 * 8 * 4096 + 4 * 8 * 128
    assert num_bytes(case, "cuda") == num_bytes(case, "xla") == moved + 4 * 128 * 4096
    assert num_bytes(case, "cuda:3") == moved + 6 * 128 * 4096
    assert num_bytes(case, "router+topk") == num_bytes(case, "auto") + 8 * (8 * 8 + 4)


def test_case_patterns():
    names = [rows.case_name(c) for c in rows.select(BENCHMARK.cases, "hy3/*,longcat/64")]
    assert len(names) == 12 and "longcat/64" in names and "longcat-lite/64" not in names
    with pytest.raises(ValueError, match="no case matches 'hy4"):
        rows.select(BENCHMARK.cases, "hy4/*")
    with pytest.raises(ValueError, match="got \\['triton'\\]"):
        BENCHMARK.select_impls("cuda,triton")


def test_every_impl_has_a_row_and_its_label():
    for impl in BENCHMARK.impls:
        assert BENCHMARK.label(BENCHMARK.row(BENCHMARK.cases[0], impl)) == impl


@pytest.mark.parametrize("impl", ["auto", "bf16x3", "router+topk"])
def test_router_workloads_trace(impl):
    workload = BENCHMARK.workload({"shape": "longcat", "m": 8}, impl)
    operands, state = jax.eval_shape(workload.make, jax.random.key(0))
    out, _ = jax.eval_shape(workload.call, operands, state)
    assert jax.tree.leaves(out)[0].shape == (8, 768)


# Results and the runner.


def test_sources_hash(tmp_path):
    def digest():
        return results.sources_hash(("router_gemm",), tmp_path)

    kernel = tmp_path / "cuda" / "router_gemm" / "kernel.cuh"
    for path in (kernel, tmp_path / "cuda" / "ffi" / "router_gemm.cc"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one")
    before = digest()
    unrelated = tmp_path / "jax_hpc" / "ops" / "router_gemm" / "__pycache__" / "api.pyc"
    unrelated.parent.mkdir(parents=True)
    unrelated.write_text("bytes")
    (tmp_path / "cuda" / "ffi" / "other.cc").write_text("other")
    assert digest() == before
    kernel.write_text("two")
    assert digest() != before


def test_rows_of_another_device_are_refused(tmp_path):
    kept = results.Results(tmp_path / "router.jsonl")
    kept.start({"device": "H200", "driver": "580", "jax": "1", "jaxlib": "1"})
    with pytest.raises(ValueError, match="write to another file"):
        results.Results(kept.path).start({"device": "cpu"})


class Worker:
    """Takes the place of the measuring processes; remembers what they were asked for."""

    def __init__(self, monkeypatch, times, fails=(), dies_at=None, process_limit=None):
        self.asked, self.times, self.fails, self.dies_at = [], times, fails, dies_at
        self.hash = results.sources_hash(BENCHMARK.operators)
        self.process_limit = process_limit
        monkeypatch.setattr(runner, "messages", self.messages)

    def messages(self, plan, jobs):
        self.asked.append([runner.job_name(job) for job in jobs])
        yield {"meta": {"device": "test", "sources_hash": self.hash}}
        for case, impl in jobs:
            name = runner.job_name((case, impl))
            if name == self.dies_at:
                return
            if name in self.fails:
                yield {"error": "NotImplementedError: no"}
            else:
                yield {"us": self.times[len(self.asked) - 1], "layers": 8}
        if len(self.asked) == self.process_limit:
            plan.deadline = 0.0


def run(path, *more, selected="qwen3/8,qwen3/16"):
    runner.main(
        ["--op", "router", "--rows", selected, "--impls", "auto,xla", "--out", str(path), *more]
    )
    return {
        f"{rows.case_name(rows.case_of(r))} {BENCHMARK.label(r)}": r
        for r in results.read_results(path)[1]
    }


def test_median_of_processes_and_resuming(tmp_path, monkeypatch, capsys):
    path = tmp_path / "router.jsonl"
    worker = Worker(monkeypatch, [5.0, 9.0, 6.0, 7.0])
    measured = run(path)
    assert [len(jobs) for jobs in worker.asked] == [4, 4, 4]
    row = measured["qwen3/8 auto"]
    assert row["us"] == 6.0 and row["processes"] == 3 and row["terms"] == 2
    assert row["spread"] == pytest.approx(4 / 6, abs=1e-3)
    assert "geometric mean" in capsys.readouterr().out
    first = json.loads(path.read_text().splitlines()[0])["meta"]
    assert first["device"] == "test"

    run(path)
    assert len(worker.asked) == 3, "rows that are there are not measured again"
    run(path, "--processes", "1", selected="qwen3/32")
    assert worker.asked[3:] == [["qwen3/32 auto", "qwen3/32 xla"]]
    monkeypatch.setattr(runner, "sources_hash", lambda _: "other sources")
    worker.times, worker.hash = [1.0] * 9, "other sources"
    assert run(path, selected="qwen3/8")["qwen3/8 auto"]["us"] == 1.0
    assert len(results.read_results(path)[1]) == 6


def test_a_failing_row_keeps_no_other_from_being_measured(tmp_path, monkeypatch, capsys):
    worker = Worker(monkeypatch, [5.0] * 9, fails=("qwen3/8 auto",), dies_at="qwen3/8 xla")
    measured = run(tmp_path / "r.jsonl", "--processes", "2")
    assert sorted(measured) == ["qwen3/16 auto", "qwen3/16 xla"]
    assert [len(jobs) for jobs in worker.asked] == [4, 2, 2]
    output = capsys.readouterr().out
    assert "NotImplementedError" in output and "took too long" in output


def test_the_budget_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    Worker(monkeypatch, [5.0, 6.0, 7.0], process_limit=2)
    measured = run(tmp_path / "r.jsonl")
    assert {row["processes"] for row in measured.values()} == {2}
    assert "budget is used up" in capsys.readouterr().out
    worker = Worker(monkeypatch, [7.0, 7.0, 7.0])
    assert run(tmp_path / "r.jsonl")["qwen3/8 auto"]["processes"] == 3
    assert len(worker.asked) == 3, "rows of fewer processes are measured again"


def test_a_row_measured_in_a_real_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "")
    tiny = ["--seconds", "0.001", "--repeat-seconds", "0.001", "--cold-bytes", "1"]
    path = tmp_path / "r.jsonl"
    runner.main(
        ["--op", "router", "--rows", "qwen3/1", "--impls", "xla,cuda", "--processes", "1"]
        + ["--out", str(path), *tiny]
    )
    meta, measured = results.read_results(path)
    output = capsys.readouterr().out
    assert meta is not None and {"device", "driver", "jax", "jaxlib", "date", "version"} <= set(
        meta
    )
    assert meta["sources_hash"] == results.sources_hash(BENCHMARK.operators)
    assert "xla" in [row["impl"] for row in measured], output
    if jax.default_backend() == "cpu":
        assert "qwen3/1 cuda: NotImplementedError" in output


# The report.


def synthetic(impl, m, us):
    row = BENCHMARK.row({"shape": "hy3", "m": m}, impl)
    return row | {"us": us, "sources_hash": "x", "processes": 3, "spread": 0.0, "layers": 8}


PEERS = [
    {"op": "router", "shape": "hy3", "m": 1, "peer": "hpcops:router", "us": 6.0},
    {"op": "router", "shape": "hy3", "m": 1, "peer": "jaxdistinct:xla-f32", "us": 2.0},
    {"op": "router", "shape": "hy3", "m": 8, "peer": "hpcops:router", "us": 6.0},
    {"op": "router", "shape": "hy3", "m": 8, "peer": "torch:cublas-tf32", "us": 1.0},
    {"op": "moe-fp8", "shape": "hy3", "bs": 8, "peer": "hpcops:moe", "us": 1.0},
]


def test_comparison_with_the_fastest_equal_peer():
    ours = [synthetic("cuda", 1, 3.0), synthetic("cuda", 8, 3.0), synthetic("xla", 1, 4.0)]
    one, eight = report.compare(BENCHMARK, ours, PEERS)
    assert (one.peer, one.peer_us) == ("xla", 4.0), "measured beside it, so the record is replaced"
    assert (eight.peer, eight.ratio) == ("hpcops:router", 2.0), "TF32 is no rival"
    text = "\n".join(report.summary(BENCHMARK, [one, eight]))
    assert re.search(r"cuda +all +2 rows +geometric mean +1\.63x", text)
    assert re.search(r"cuda +m >= 8 +1 rows +geometric mean +2\.00x", text)


@pytest.mark.parametrize(
    "us, peer_us, slower",
    [(6.29, 6.0, False), (6.31, 6.0, True), (102.9, 100, False), (104, 100, True)],
)
def test_slower_means_more_than_noise(us, peer_us, slower):
    assert report.Comparison({"us": us}, "cuda", "peer", peer_us).slower is slower


def test_the_whole_report(tmp_path):
    path = tmp_path / "router.jsonl"
    kept = results.Results(path)
    kept.start({"device": "H200", "driver": "580", "jax": "0.11.2"})
    for row in (synthetic("cuda", 8, 7.0), synthetic("cuda:3", 8, 5.0), synthetic("xla", 8, 9.0)):
        kept.add(row)
    text = report.report("router", path, results.BASELINES)
    assert "3 rows, 3 of them from other sources" in text
    assert re.search(
        r"hy3/8 +cuda +7\.00 us.*0\.88x of jaxdistinct:xla-bf16x3 6\.18  SLOWER", text
    )
    assert re.search(r"hy3/8 +cuda:3 +5\.00 us.*1\.24x", text)
    assert re.search(r"hy3/8 +xla +9\.00 us", text)
    assert "no results" in report.report("router", tmp_path / "none.jsonl", results.BASELINES)


def test_plot(tmp_path):
    from benchmarks.plots import plot

    path = plot(BENCHMARK, [synthetic("cuda", 8, 7.0)], PEERS, tmp_path)
    assert path.read_text().count("<svg") == 1


def test_options_are_documented():
    page = (results.HERE.parent / "docs" / "benchmarking.md").read_text()
    for option in re.findall(r"--[a-z-]+", runner.parser().format_usage()):
        assert f"`{option}" in page, option
