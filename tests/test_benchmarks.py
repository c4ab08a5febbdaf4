"""The benchmarks' rows, runner and report, on a CPU: what is asked for, kept and compared."""

import json
import re
import sys
import threading
import types

import jax
import numpy as np
import pytest

from benchmarks import report, results, rows, runner, timing
from benchmarks.router import BENCHMARK, num_bytes
from jax_hpc import _registry

# Rows.


def test_router_floors_are_those_of_the_baselines():
    recorded = [r for r in results.read_rows(results.BASELINES) if r["op"] == "router"]
    assert len(recorded) > 100
    for row in recorded:
        ours = BENCHMARK.row(rows.case_of(row), "cuda")
        assert abs(ours["floor_us"] - row["floor_us"]) < 0.011, (row, ours)


@pytest.mark.parametrize("op", ["decode-bf16", "decode-fp8"])
def test_decode_floors_are_those_of_the_baselines(op):
    recorded = [r for r in results.read_rows(results.BASELINES) if r["op"] == op]
    assert len(recorded) > 60
    benchmark = rows.load(op)
    assert {rows.case_name(rows.case_of(r)) for r in recorded} == set(
        map(rows.case_name, benchmark.cases)
    )
    for row in recorded:
        ours = benchmark.row(rows.case_of(row), "cuda")
        assert abs(ours["floor_us"] - row["floor_us"]) < 0.011, (row, ours)


@pytest.mark.parametrize("op", ["decode-bf16", "decode-fp8"])
@pytest.mark.parametrize("impl", ["cuda", "own", "static", "splits-8", "xla"])
def test_decode_workloads_trace(op, impl, monkeypatch):
    monkeypatch.setattr(_registry, "unusable_reason", lambda: None)
    workload = rows.load(op).workload({"heads": "tp8", "case": "1x16K+15x64"}, impl)
    operands, state = jax.eval_shape(workload.make, jax.random.key(0))
    (q, k_pages, *_), schedule, scales = operands
    out, left = jax.eval_shape(workload.call, operands, state)
    assert (out.shape, out.dtype.name) == (q.shape, "bfloat16") and left == ()
    assert k_pages.shape == (271, 1, 64, 128) and schedule.batch == 16
    assert len(scales) == (3 if op == "decode-fp8" else 0)


@pytest.mark.parametrize("op", ["prefill-bf16", "prefill-fp8"])
def test_prefill_floors_are_those_of_the_baselines(op):
    recorded = [r for r in results.read_rows(results.BASELINES) if r["op"] == op]
    benchmark = rows.load(op)
    seen = {rows.case_name(rows.case_of(row)) for row in recorded}
    assert seen == {rows.case_name(case) for case in benchmark.cases}
    for row in recorded:
        ours = benchmark.row(rows.case_of(row), "cuda")
        assert ours["floor_us"] == pytest.approx(row["floor_us"], rel=1e-3), (row, ours)


@pytest.mark.parametrize("op", ["prefill-bf16", "prefill-fp8"])
def test_prefill_workloads_trace(op, monkeypatch):
    monkeypatch.setattr(_registry, "unusable_reason", lambda: None)
    workload = rows.load(op).workload({"case": "16x512 on 8K"}, "cuda")
    operands, state = jax.eval_shape(workload.make, jax.random.key(0))
    (q, k_pages, *_), scales = operands
    out, left = jax.eval_shape(workload.call, operands, state)
    assert (out.shape, out.dtype.name) == (q.shape, "bfloat16") and left == ()
    assert q.shape == (8192, 64, 128) and k_pages.shape == (2176, 8, 64, 128)
    assert len(scales) == (3 if op == "prefill-fp8" else 0)


def test_prefill_peer_sees_the_same_batch_in_its_own_layout(monkeypatch):
    seen = []

    def attention(q, k_cache, v_cache, *, cache_seqlens, page_table, is_causal):
        seen.extend((q.shape, k_cache.shape, v_cache.shape, cache_seqlens.shape, page_table.shape))
        assert is_causal
        return q

    peer = types.SimpleNamespace(flash_mha_with_kvcache=attention)
    monkeypatch.setitem(sys.modules, "flash_attn3_jax", peer)
    workload = rows.load("prefill-bf16").workload({"case": "16x512 on 8K"}, "fa3")
    out, left = jax.eval_shape(workload.call, *jax.eval_shape(workload.make, jax.random.key(0)))
    assert out.shape == (8192, 64, 128) and left == ()
    pages = (2176, 64, 8, 128)
    assert seen == [(16, 512, 64, 128), pages, pages, (16,), (16, 136)]


def test_prologue_floors_are_those_of_the_baselines():
    op = "prologue-bf16"
    recorded = [r for r in results.read_rows(results.BASELINES) if r["op"] == op]
    benchmark = rows.load(op)
    assert [rows.case_of(row) for row in recorded] == benchmark.cases
    for row in recorded:
        ours = benchmark.row(rows.case_of(row), "cuda")
        assert abs(ours["floor_us"] - row["floor_us"]) < 0.011, (row, ours)


@pytest.mark.parametrize("op", ["prologue-bf16", "prologue-fp8"])
@pytest.mark.parametrize("tokens", [64, 1024])
def test_prologue_writes_every_token_of_the_caches_it_carries(op, tokens):
    workload = rows.load(op).workload({"heads": "tp8", "T": tokens}, "xla")
    operands, state = jax.jit(workload.make)(jax.random.key(0))
    results, caches = jax.jit(workload.call)(operands, state)
    for before, after in zip(state, caches, strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        before, after = (np.asarray(x, np.float32).reshape(-1, 128) for x in (before, after))
        assert (before != after).any(axis=1).sum() == tokens
    timing.check_results([results])


def test_norm_floors_count_both_inputs_and_both_results():
    benchmark = rows.load("rms-norm")
    row = benchmark.row({"H": 2048, "T": 8192}, "cuda")
    assert row["floor_us"] == pytest.approx(4 * 2 * 8192 * 2048 / 4.3e6, rel=1e-3)
    workload = benchmark.workload({"H": 2048, "T": 2}, "xla")
    operands, state = jax.jit(workload.make)(jax.random.key(0))
    results, state = jax.jit(workload.call)(operands, state)
    assert results.shape == state.shape == (2, 2048)
    timing.check_results([results, state])


def test_practical_floor_is_what_was_measured():
    for megabytes, tb_per_s in ((8, 1.44), (32, 2.85), (128, 3.9), (512, 4.4)):
        measured = megabytes / tb_per_s
        assert rows.practical_floor_us(megabytes * 1e6) == pytest.approx(measured, rel=0.05)


def test_bytes_of_a_router():
    case = {"shape": "qwen3", "m": 8}
    moved = 2 * 8 * 4096 + 4 * 8 * 128
    assert num_bytes(case, "cuda") == num_bytes(case, "xla") == moved + 4 * 128 * 4096
    assert num_bytes(case, "cuda:3") == moved + 6 * 128 * 4096
    chosen = 8 * 8 * 8
    logits = 4 * 8 * 128
    assert num_bytes(case, "router+topk") == num_bytes(case, "auto") - logits + chosen
    assert num_bytes(case, "router-topk") == num_bytes(case, "router+topk")
    assert num_bytes(case, "topk") == logits + chosen
    with_zero_experts = {"shape": "longcat", "m": 8}
    assert num_bytes(with_zero_experts, "topk") == 4 * 8 * 768 + 8 * (8 * 12 + 4)


def test_case_patterns():
    names = [rows.case_name(c) for c in rows.select(BENCHMARK.cases, "hy3/*,longcat/64")]
    assert len(names) == 12 and "longcat/64" in names and "longcat-lite/64" not in names
    with pytest.raises(ValueError, match="no case matches 'hy4"):
        rows.select(BENCHMARK.cases, "hy4/*")
    with pytest.raises(ValueError, match="got \\['triton'\\]"):
        BENCHMARK.select_jobs(None, "cuda,triton")


def test_impls_of_some_cases():
    jobs = BENCHMARK.select_jobs("hy3/*,qwen3/64", "cuda,cuda:3@hy3/1|*/64,topk@longcat/*")
    threes = [rows.case_name(case) for case, impl in jobs if impl == "cuda:3"]
    assert threes == ["hy3/1", "hy3/64", "qwen3/64"] and len(jobs) == 12 + 3
    default = BENCHMARK.select_jobs(None, None)
    assert sum(impl == "auto" for _, impl in default) == len(BENCHMARK.cases)
    assert {impl for _, impl in default} >= {"xla", "bf16x3", "xla-parts", "router-topk"}


def test_every_impl_has_a_row_and_its_label():
    for impl in BENCHMARK.impls:
        assert BENCHMARK.label(BENCHMARK.row(BENCHMARK.cases[0], impl)) == impl


@pytest.mark.parametrize("impl", [impl for impl in BENCHMARK.impls if "cuda" not in impl])
def test_router_workloads_trace(impl):
    workload = BENCHMARK.workload({"shape": "longcat", "m": 8}, impl)
    operands, state = jax.eval_shape(workload.make, jax.random.key(0))
    out, _ = jax.eval_shape(workload.call, operands, state)
    assert [leaf.shape for leaf in jax.tree.leaves(out)] == (
        [(8, 12), (8, 12), (8,)] if "topk" in impl else [(8, 768)]
    )


def test_who_has_the_full_weight():
    def full(impl):
        workload = BENCHMARK.workload({"shape": "hy3", "m": 8}, impl)
        (_, weight, _), _ = jax.eval_shape(workload.make, jax.random.key(0))
        return weight.full is not None

    assert full("auto-full") and full("xla") and full("bf16x3")
    assert not any(map(full, ("auto", "cuda", "xla-parts", "router-topk")))


# Results and the runner.


def test_sources_hash(tmp_path):
    def digest():
        return results.sources_hash(("router_gemm",), tmp_path)

    def write(path, text="one"):
        path = tmp_path / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("cuda/router_gemm/kernel.cuh", '#include "common/copies.h"')
    write("cuda/ffi/router_gemm.cc", '#include "ffi/status.h"')
    for header in ("common/copies", "common/barriers", "ffi/status"):
        write(f"cuda/{header}.h", '#include "common/barriers.h"')
    before = digest()
    for unrelated in (
        "jax_hpc/ops/router_gemm/__pycache__/api.pyc",
        "cuda/ffi/other.cc",
        "cuda/common/other.cuh",
    ):
        write(unrelated)
        assert digest() == before
    for mine in (
        "cuda/router_gemm/kernel.cuh",
        "cuda/common/barriers.cu",  # what a header two removes away declares
        "cuda/ffi/status.h",
        "jax_hpc/ops/router_gemm/api.py",
    ):
        before = digest()
        write(mine, '#include "common/copies.h"\n// changed')
        assert digest() != before, mine


def test_sources_of_every_operator_are_found():
    for op in ("router", "decode-bf16", "prefill-bf16", "prologue-fp8"):
        benchmark = rows.load(op)
        found = {path.name for path in results.sources(benchmark.operators(benchmark.impls[0]))}
        assert {"status.h", "launch.h", "launch.cu", "primitive.py"} <= found


def test_a_row_goes_stale_with_its_own_operators():
    operators = {impl: BENCHMARK.operators(impl) for impl in BENCHMARK.impls}
    for impl in ("auto", "auto-full", "cuda:3", "xla-parts"):
        assert operators[impl] == ("router_gemm",)
    assert operators["xla"] == operators["bf16x3"] == ()
    assert operators["topk"] == ("route_topk",)
    assert operators["router+topk:3"] == ("router_gemm", "route_topk")
    assert operators["router-topk"] == ("router_gemm", "route_topk", "router_topk")


def test_rows_of_another_device_are_refused(tmp_path):
    kept = results.Results(tmp_path / "router.jsonl")
    kept.start({"device": "H200", "driver": "580", "jax": "1", "jaxlib": "1"})
    with pytest.raises(ValueError, match="write to another file"):
        results.Results(kept.path).start({"device": "cpu"})


class Worker:
    """Takes the place of the measuring processes; remembers what they were asked for."""

    def __init__(self, monkeypatch, times, fails=(), dies_at=None, process_limit=None):
        self.asked, self.times, self.fails, self.dies_at = [], times, fails, dies_at
        self.hash: str | None = None  # another one than the sources have
        self.process_limit = process_limit
        self.devices = []
        self.lock = threading.Lock()
        monkeypatch.setattr(runner, "messages", self.messages)

    def messages(self, plan, jobs, device):
        with self.lock:
            time = self.times[len(self.asked)]
            self.asked.append([runner.job_name(job) for job in jobs])
            self.devices.append(device)
        yield {"meta": {"device": "test"}}
        for case, impl in jobs:
            name = runner.job_name((case, impl))
            if name == self.dies_at:
                return
            if name in self.fails:
                yield {"error": "NotImplementedError: no"}
            else:
                digest = self.hash or results.sources_hash(BENCHMARK.operators(impl))
                yield {"us": time, "layers": 8, "spent": {}, "sources_hash": digest}
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


def test_groups_are_spread_over_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    worker = Worker(monkeypatch, [5.0] * 99)
    measured = run(tmp_path / "r.jsonl", "--devices", "2", "--group", "2", selected="qwen3/*")
    assert len(measured) == 22 and {row["processes"] for row in measured.values()} == {3}
    assert len(worker.asked) == 3 * 6 and set(worker.devices) <= {0, 1}
    of_group = {}
    for jobs, device in zip(worker.asked, worker.devices, strict=True):
        of_group.setdefault(tuple(jobs), set()).add(device)
    assert all(len(devices) == 1 for devices in of_group.values()), of_group


def test_processes_are_pinned_to_their_devices(monkeypatch, tmp_path):
    seen = []

    def popen(*_, env, **__):
        seen.append(env.get("CUDA_VISIBLE_DEVICES"))
        raise OSError("no process here")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert runner.visible_devices() == ["3", "5"]
    monkeypatch.setattr(runner.subprocess, "Popen", popen)
    for devices, device in ((2, 0), (2, 1), (1, 0)):
        plan = runner.Plan(BENCHMARK, None, 1, 1, devices, 1.0, 1e9, {}, {})
        with pytest.raises(OSError, match="no process"):
            next(runner.messages(plan, [], device))
    assert seen == ["3", "5", None]
    with pytest.raises(ValueError, match="--devices 3: this machine shows 2 GPUs"):
        run(tmp_path / "r.jsonl", "--devices", "3")


def test_an_error_on_one_device_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    worker = Worker(monkeypatch, [5.0] * 99)
    path = tmp_path / "r.jsonl"
    results.Results(path).start({"device": "another"})
    with pytest.raises(ValueError, match="write to another file"):
        run(path, "--devices", "2", "--group", "1", selected="qwen3/*")
    assert len(worker.asked) <= 2


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


def test_a_budget_that_ends_early_takes_no_row_of_more_processes_away(tmp_path, monkeypatch):
    path = tmp_path / "router.jsonl"
    worker = Worker(monkeypatch, [5.0, 5.0, 9.0], process_limit=3)
    run(path, "--processes", "2", selected="qwen3/8")
    measured = run(path, "--processes", "3", selected="qwen3/8")
    assert len(worker.asked) == 3
    assert measured["qwen3/8 auto"]["us"] == 5.0 and measured["qwen3/8 auto"]["processes"] == 2


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
    (row,) = (row for row in measured if row["impl"] == "xla")
    assert row["sources_hash"] == results.sources_hash(())
    assert re.search(r"s on 1 device\(s\); .*starting processes \d+, making operands", output)
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
    ours.append(synthetic("xla-parts", 8, 5.0) | {"terms": 3})  # of another number of terms
    one, eight = report.compare(BENCHMARK, ours, PEERS)
    assert (one.peer, one.peer_us) == ("xla", 4.0), "measured beside it, so the record is replaced"
    assert (eight.peer, eight.ratio) == ("hpcops:router", 2.0), "TF32 is no rival"
    text = "\n".join(report.summary(BENCHMARK, [one, eight]))
    assert re.search(r"cuda +all +2 rows +geometric mean +1\.63x", text)
    assert re.search(
        r"cuda +m >= 8 +1 rows +geometric mean +2\.00x +least +2\.00x \(hy3/8\)", text
    )


def test_one_call_competes_with_two():
    ours = [synthetic(i, 8, us) for i, us in (("router-topk", 6.0), ("router+topk", 7.5))]
    (comparison,) = report.compare(BENCHMARK, [*ours, synthetic("xla", 8, 1.0)], PEERS)
    assert (comparison.label, comparison.peer) == ("router-topk", "router+topk")
    assert comparison.ratio == 1.25


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
