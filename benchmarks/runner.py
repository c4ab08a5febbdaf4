"""Measures rows in fresh processes and keeps each as soon as it is known.

``python -m benchmarks --op router --rows 'hy3/*,longcat/64' --impls cuda,xla --budget 500``

Rows that the file has already, from the same sources, are skipped: an interrupted run goes on
where it stopped. Several cases share a process, since starting one takes seconds; every case is
measured in as many processes as asked for, and its time is their median. Groups of cases are
spread over the GPUs, one process on each at a time; all processes of a group run on one GPU.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.results import (
    BASELINES,
    HERE,
    RESULTS,
    Results,
    read_rows,
    sources_hash,
    summary_of,
)
from benchmarks.rows import Benchmark, Case, Row, case_name, load
from benchmarks.worker import MARK

Job = tuple[Case, str]
START_SECONDS = 60
"""What a process may take before its first row."""


@dataclasses.dataclass
class Plan:
    """What to measure, and how."""

    benchmark: Benchmark
    results: Results
    processes: int
    group: int
    devices: int
    row_timeout: float
    deadline: float
    settings: dict[str, Any]
    environment: dict[str, str]

    @property
    def time_left(self) -> float:
        return self.deadline - time.monotonic()


class Run:
    """One run over all jobs."""

    def __init__(self, plan: Plan, jobs: Sequence[Job]) -> None:
        self.plan = plan
        self.jobs = list(jobs)
        self.finished = 0
        self.failed: set[str] = set()
        self.samples: dict[str, list[Row]] = {}
        self.spent: dict[str, float] = collections.defaultdict(float)
        self.baselines = read_rows(BASELINES)
        self._lock = threading.Lock()

    def measure_all(self) -> None:
        """Measure group after group, on each device the next one that no other has taken."""
        cases = list(dict.fromkeys(case_name(case) for case, _ in self.jobs))
        size = min(self.plan.group, math.ceil(len(cases) / self.plan.devices)) or 1
        groups = [set(cases[start : start + size]) for start in range(0, len(cases), size)]

        def on_device(device: int) -> None:
            while groups and self.plan.time_left > 0:
                with self._lock:
                    names = groups.pop(0) if groups else set()
                self._measure_group([j for j in self.jobs if case_name(j[0]) in names], device)

        with concurrent.futures.ThreadPoolExecutor(self.plan.devices) as pool:
            futures = [pool.submit(on_device, i) for i in range(self.plan.devices)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self.plan.deadline = -math.inf  # ends the other devices' processes too
                raise
        if self.plan.time_left <= 0:
            print("the time budget is used up; the same command goes on from here")

    def _measure_group(self, jobs: list[Job], device: int) -> None:
        for _ in range(self.plan.processes):
            left = [job for job in jobs if job_name(job) not in self.failed]
            while left and self.plan.time_left > 0:
                left = self._one_process(left, device)
        with self._lock:
            for job in jobs:
                samples = self.samples.get(job_name(job), [])
                if 0 < len(samples) < self.plan.processes and not self._is_known(job, samples):
                    self._keep(job)

    def _is_known(self, job: Job, samples: Sequence[Row]) -> bool:
        """Whether the file has the row of a job that the budget cut short, of as many."""
        row = self.plan.benchmark.row(*job)
        return self.plan.results.has(row, samples[-1]["sources_hash"], len(samples))

    def _one_process(self, jobs: list[Job], device: int) -> list[Job]:
        """Measure jobs in a new process; gives those that it did not come to."""
        left, start = list(jobs), time.monotonic()
        for message in messages(self.plan, jobs, device):
            with self._lock:
                if "meta" in message:
                    self.plan.results.start(message["meta"])
                    self.spent["starting processes"] += time.monotonic() - start
                else:
                    self._take(left.pop(0), message)
        if left and self.plan.time_left > 0:  # the process died or hung at the next job
            with self._lock:
                self._take(left.pop(0), {"error": "the process ended or took too long"})
        return left

    def _take(self, job: Job, message: dict[str, Any]) -> None:
        name = job_name(job)
        if "error" in message:
            self.failed.add(name)
            self.finished += 1
            print(f"{self._progress()} {name}: {message['error']}", flush=True)
            return
        for part, seconds in message["spent"].items():
            self.spent[part] += seconds
        samples = self.samples.setdefault(name, [])
        samples.append(message)
        if len(samples) == self.plan.processes:
            self._keep(job)
        else:
            number = f"process {len(samples)} of {self.plan.processes}"
            print(f"{'':>9} {name:<38}{message['us']:>10.2f} us  {number}", flush=True)

    def _keep(self, job: Job) -> None:
        samples = self.samples.pop(job_name(job))
        row = self.plan.benchmark.row(*job)
        row |= summary_of([sample["us"] for sample in samples])
        row |= {"layers": samples[0]["layers"], "sources_hash": samples[-1]["sources_hash"]}
        self.plan.results.add(row)
        self.finished += 1
        comparisons = report.compare(
            self.plan.benchmark, [*self.plan.results.rows], self.baselines
        )
        mine = next((c for c in comparisons if c.row is row), None)
        print(self._progress(), report.line(job[1], row, mine), flush=True)

    def _progress(self) -> str:
        return f"[{self.finished:>3}/{len(self.jobs):>3}]"


def job_name(job: Job) -> str:
    return f"{case_name(job[0])} {job[1]}"


def messages(plan: Plan, jobs: Sequence[Job], device: int) -> Iterator[dict[str, Any]]:
    """Start a process for jobs on a device and give what it says, as it says it.

    The process is ended when a row takes too long or the budget is used up.
    """
    request = {"op": plan.benchmark.op, "jobs": jobs, "settings": plan.settings}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=plan.environment | {"CUDA_VISIBLE_DEVICES": visible_devices()[device]}
            if plan.devices > 1
            else plan.environment,
        )
        assert process.stdin is not None and process.stdout is not None
        patience = Patience(process, plan)
        with process:
            try:
                process.stdin.write(json.dumps(request))
                process.stdin.close()
                patience.renew(START_SECONDS + plan.row_timeout)
                for text in process.stdout:
                    if text.startswith(MARK):
                        patience.renew(plan.row_timeout)
                        yield json.loads(text.removeprefix(MARK))
            finally:
                patience.end()
                process.kill()
        if process.returncode not in (0, -9):
            errors.seek(0)
            print(errors.read()[-2000:], file=sys.stderr)


class Patience:
    """Ends a process that says nothing for too long."""

    def __init__(self, process: subprocess.Popen[str], plan: Plan) -> None:
        self._process, self._plan = process, plan
        self._timer: threading.Timer | None = None

    def renew(self, seconds: float) -> None:
        self.end()
        wait = max(0.0, min(seconds, self._plan.time_left))
        self._timer = threading.Timer(wait, self._process.kill)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def environment(cache: str) -> dict[str, str]:
    """Of the measuring processes: this package, and compiled programs kept for the next process.

    Autotuning many products takes minutes; processes of one run share its choices.
    """
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def visible_devices() -> list[str]:
    """GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; empty without any."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is not None:
        return [name for name in asked.split(",") if name]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except FileNotFoundError:
        return []
    return [str(i) for i, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU")]


def pending(benchmark: Benchmark, results: Results, options: argparse.Namespace) -> list[Job]:
    """Jobs whose rows are not in the file, or from other sources or fewer processes."""

    def is_there(case: Case, impl: str) -> bool:
        current = sources_hash(benchmark.operators(impl))
        return results.has(benchmark.row(case, impl), current, options.processes)

    return [
        (case, impl)
        for case, impl in benchmark.select_jobs(options.rows, options.impls)
        if not is_there(case, impl)
    ]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--op", required=True)
    parser.add_argument("--rows", help="cases, as patterns: 'hy3/*,longcat/64'; all by default")
    parser.add_argument("--impls", help="comma-separated, such as 'cuda,xla,cuda:3@hy3/*|*/64'")
    parser.add_argument("--out", type=Path, help=f"results file; {RESULTS}/OP.jsonl by default")
    parser.add_argument("--processes", type=int, default=3, help="their median is the time")
    parser.add_argument("--group", type=int, default=11, help="cases that share a process")
    parser.add_argument(
        "--devices", type=int, help="GPUs to spread the cases over; all by default"
    )
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for all")
    parser.add_argument(
        "--row-timeout", type=float, default=120, help="seconds for one row, compilation included"
    )
    parser.add_argument("--seconds", type=float, default=0.1, help="of repeats per row")
    parser.add_argument(
        "--repeat-seconds", type=float, default=0.01, help="of one run of its loop"
    )
    parser.add_argument("--cold-bytes", type=int, default=200_000_000, help="distinct, per pass")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    benchmark = load(options.op)
    results = Results(options.out or RESULTS / f"{options.op}.jsonl")
    jobs = pending(benchmark, results, options)
    started, gpus = time.monotonic(), visible_devices()
    devices = options.devices or max(1, len(gpus))
    if devices > max(1, len(gpus)):
        raise ValueError(f"--devices {devices}: this machine shows {len(gpus)} GPUs")
    with tempfile.TemporaryDirectory() as cache:
        plan = Plan(
            benchmark=benchmark,
            results=results,
            processes=options.processes,
            group=options.group,
            devices=devices,
            row_timeout=options.row_timeout,
            deadline=time.monotonic() + min(options.budget, threading.TIMEOUT_MAX / 2),
            settings={
                "seconds": options.seconds,
                "repeat_seconds": options.repeat_seconds,
                "cold_bytes": options.cold_bytes,
            },
            environment=environment(cache),
        )
        print(f"{options.op}: {len(jobs)} rows to measure, into {results.path}", flush=True)
        run = Run(plan, jobs)
        run.measure_all()
    wall = time.monotonic() - started
    parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in run.spent.items())
    print(f"{wall:.0f} s on {plan.devices} device(s); of these, summed over devices: {parts}")
    comparisons = report.compare(benchmark, results.rows, read_rows(BASELINES))
    print("\n".join(report.summary(benchmark, comparisons)))
