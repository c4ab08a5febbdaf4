"""What a device did, as JAX's profiler recorded it: the kernels and the copies that really ran."""

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
    """Names of what ran on all GPUs; kernels are demangled."""

    kernels: list[str]
    moves: list[str]

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
    names = [
        event.name
        for plane in ProfileData.from_file(str(path)).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    moves = [name for name in names if _MOVE.match(name)]
    return DeviceTrace([name for name in names if not _MOVE.match(name)], moves)
