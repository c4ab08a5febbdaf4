"""Chooses the CUDA compiler of a build: the machine's, NVIDIA's wheels, or none.

Standard library only. Run as a script it prints what a build on this machine would do.
"""

import dataclasses
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

MINIMUM = (13, 0)
WHEELS = (
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
)
CHOICES = ("auto", "toolkit", "wheels", "off")

Source = Literal["toolkit", "wheels", "off"]


class ToolkitError(RuntimeError):
    """JAX_HPC_CUDA asks for something that this machine does not have."""


@dataclasses.dataclass(frozen=True)
class Host:
    """What the choice depends on besides the environment variables."""

    platform: str
    libc: str
    python_headers: Path
    stable_abi: bool
    default_nvcc: Path = Path("/usr/local/cuda/bin/nvcc")

    @classmethod
    def current(cls) -> "Host":
        """The machine and interpreter that run this."""
        return cls(
            platform=f"{sys.platform}-{platform.machine()}",
            libc=platform.libc_ver()[0],
            python_headers=Path(sysconfig.get_path("include")),
            stable_abi=sys.implementation.name == "cpython"
            and not sysconfig.get_config_var("Py_GIL_DISABLED"),
        )

    def obstacle(self, env: Mapping[str, str]) -> str | None:
        """Why the extension cannot be built here whatever the CUDA compiler; None if it can."""
        if self.platform != "linux-x86_64" or self.libc != "glibc":
            return f"the kernels need Linux x86-64 with glibc, this is {self.platform} {self.libc}"
        if not self.stable_abi:
            return "the extension needs CPython's stable ABI, which this interpreter lacks"
        if not (self.python_headers / "Python.h").is_file():
            return f"no Python.h in {self.python_headers} (on Debian: apt install python3-dev)"
        compilers = (env["CXX"],) if env.get("CXX") else ("c++", "g++", "clang++")
        if not any(shutil.which(compiler, path=env.get("PATH")) for compiler in compilers):
            return f"no C++ compiler ({', '.join(compilers)}) on PATH"
        return None


@dataclasses.dataclass(frozen=True)
class Choice:
    """A decision, the compiler where the machine has one, and the reasons to print."""

    source: Source
    nvcc: Path | None
    reasons: tuple[str, ...]

    def lines(self) -> list[str]:
        """What a person should read about it."""
        summary = {
            "toolkit": f"building the CUDA extension with {self.nvcc}",
            "wheels": "building the CUDA extension with NVIDIA's compiler wheels",
            "off": "installing without the CUDA extension: every operator runs its XLA form",
        }
        return [*self.reasons, summary[self.source]]


def choose(env: Mapping[str, str], host: Host) -> Choice:
    """Decide, as ``JAX_HPC_CUDA`` (auto, toolkit, wheels or off) asks.

    Raises ``ToolkitError`` when a compiler was asked for by name and cannot be had.
    """
    wanted = env.get("JAX_HPC_CUDA", "auto")
    if wanted not in CHOICES:
        raise ToolkitError(f"JAX_HPC_CUDA must be one of {', '.join(CHOICES)}, got {wanted!r}")
    if wanted == "off":
        return Choice("off", None, ("JAX_HPC_CUDA=off",))
    if obstacle := host.obstacle(env):
        if wanted != "auto":
            raise ToolkitError(f"JAX_HPC_CUDA={wanted}, but {obstacle}")
        return Choice("off", None, (obstacle,))
    if wanted == "wheels":
        return Choice("wheels", None, ("JAX_HPC_CUDA=wheels",))
    findings = []
    for candidate in _candidates(env, host):
        version, finding = inspect(candidate)
        findings.append(finding)
        if version is not None and version >= MINIMUM:
            return Choice("toolkit", candidate, tuple(findings))
    findings = findings or ["found no nvcc (CUDACXX, PATH, CUDA_HOME, /usr/local/cuda)"]
    if wanted == "toolkit":
        raise ToolkitError(f"JAX_HPC_CUDA=toolkit, but {'; '.join(findings)}")
    return Choice("wheels", None, tuple(findings))


def inspect(nvcc: Path) -> tuple[tuple[int, int] | None, str]:
    """The version of an nvcc, None if it does not run, and one line that says what it is."""
    try:
        run = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{nvcc} does not run: {error}"
    match = re.search(r"release (\d+)\.(\d+)", run.stdout)
    if run.returncode != 0 or match is None:
        return None, f"{nvcc} does not run (exit status {run.returncode})"
    version = int(match[1]), int(match[2])
    verdict = "" if version >= MINIMUM else f", older than {MINIMUM[0]}.{MINIMUM[1]}"
    return version, f"{nvcc} is CUDA {version[0]}.{version[1]}{verdict}"


def wheel_tree(search: Sequence[str]) -> Path | None:
    """The folder that NVIDIA's compiler wheels share, if they are installed on ``search``."""
    for folder in search:
        tree = Path(folder) / "nvidia" / "cu13"
        needed = ("bin/nvcc", "nvvm/bin/cicc", "include/crt", "lib/libcudart_static.a")
        if all((tree / path).exists() for path in needed):
            return tree
    return None


def _candidates(env: Mapping[str, str], host: Host) -> Iterator[Path]:
    """Every nvcc worth a try, best first, each once."""
    named = [env["CUDACXX"]] if env.get("CUDACXX") else []
    homes = [f"{env[key]}/bin/nvcc" for key in ("CUDA_HOME", "CUDA_PATH") if env.get(key)]
    seen = set()
    for name in (*named, "nvcc", *homes, str(host.default_nvcc)):
        found = shutil.which(name, path=env.get("PATH"))
        # A compiler that was named but is not there deserves a word; the rest may be absent.
        path = Path(found) if found else Path(name)
        if (found or name in named) and path not in seen:
            seen.add(path)
            yield path


if __name__ == "__main__":
    try:
        print("\n".join(choose(os.environ, Host.current()).lines()))
    except ToolkitError as problem:
        sys.exit(f"jax_hpc: {problem}")
