"""Measures rows in a process of its own: ``python -m benchmarks.worker``, started by the runner.

Reads one JSON request from its standard input and prints a line of JSON as soon as a row is
measured, marked so that whatever else prints does no harm.
"""

import datetime
import gc
import json
import subprocess
import sys
import warnings
from typing import Any

import jax

import jax_hpc
from benchmarks.results import sources_hash
from benchmarks.rows import Benchmark, load
from benchmarks.timing import measure
from jax_hpc.types import FallbackWarning

MARK = "@benchmark "


def main() -> None:
    request = json.load(sys.stdin)
    benchmark = load(request["op"])
    # "auto" without a kernel is a row like any other.
    warnings.simplefilter("ignore", FallbackWarning)
    _say({"meta": meta()})
    for case, impl in request["jobs"]:
        _say({"case": case, "impl": impl, **_measured(benchmark, case, impl, request)})
        gc.collect()  # frees the operands before the next are made


def _measured(benchmark: Benchmark, case: Any, impl: str, request: Any) -> dict[str, Any]:
    try:
        estimate = benchmark.row(case, impl)["practical_floor_us"]
        measured = measure(
            benchmark.workload(case, impl), estimate_us=estimate, **request["settings"]
        )
    except Exception as error:  # whatever one row meets, the others are measured
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return {
        "us": measured.us,
        "layers": measured.layers,
        "spent": measured.spent,
        "sources_hash": sources_hash(benchmark.operators(impl)),
    }


def meta() -> dict[str, Any]:
    info = jax_hpc.info()
    return {
        "device": jax.devices()[0].device_kind,
        "driver": _driver(),
        "jax": info["jax"],
        "jaxlib": info["jaxlib"],
        "version": info["version"],
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def _driver() -> str | None:
    if jax.default_backend() != "gpu":
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0] or None


def _say(message: dict[str, Any]) -> None:
    print(MARK + json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
