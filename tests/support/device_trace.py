"""What a device did, as JAX's profiler recorded it: the kernels and the copies that really ran."""

import collections
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

_MOVE = re.compile(r"memcpy|memset", re.IGNORECASE)


@dataclasses.dataclass
class DeviceTrace:
    """What ran on all GPUs: names of kernels, demangled, and the bytes of copies and fills.

    moves: (name, bytes); bytes are None where the profiler says none.
    """

    kernels: list[str]
    moves: list[tuple[str, int | None]]

    def __str__(self) -> str:
        kernels = dict(collections.Counter(self.kernels))
        return f"kernels {kernels}; copies and fills {self.moves}"

    @property
    def ours(self) -> list[str]:
        return [name for name in self.kernels if "jax_hpc" in name]

    @property
    def others(self) -> list[str]:
        return [name for name in self.kernels if "jax_hpc" not in name]


def device_trace(run: Callable[[], Any], folder: Path) -> DeviceTrace:
    """Record ``run()``. The profiler lets no graph run: each kernel is launched singly."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    with jax.profiler.trace(str(folder), profiler_options=options):
        jax.block_until_ready(run())
    (path,) = folder.rglob("*.xplane.pb")
    events = [
        event
        for plane in ProfileData.from_file(str(path)).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    kernels = [event.name for event in events if not _MOVE.match(event.name)]
    moves = [_move(event) for event in events if _MOVE.match(event.name)]
    return DeviceTrace(kernels, moves)


def _move(event: Any) -> tuple[str, int | None]:
    """Bytes stand in a text such as memcpy_details: "kind_src:device kind_dst:device size:4"."""
    stats = [(str(name), str(value)) for name, value in event.stats]
    for name, value in stats:
        found = re.search(r"\b(?:size|num_bytes):(\d+)", value)
        if name.endswith("_details") and found:
            return event.name, int(found[1])
    return f"{event.name} {stats}", None
