"""Loads the compiled extension once, checks what can run here, and registers FFI targets."""

import functools
import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

import jax

from jax_hpc._version import __version__

if TYPE_CHECKING:
    from jax_hpc._primitive import Operator

HOPPER = "9.0"
OPERATORS: dict[str, "Operator"] = {}
"""Every operator by name, in order of import."""


@functools.cache
def extension() -> Any | None:
    """The compiled extension, or None where the package was built without CUDA."""
    try:
        return importlib.import_module("jax_hpc._ext")
    except ModuleNotFoundError as error:
        if error.name != "jax_hpc._ext":
            raise
        return None


def why_no_extension() -> str:
    """Why the package was built without the extension, as the build noted it."""
    try:
        return importlib.import_module("jax_hpc._no_extension").REASON
    except ModuleNotFoundError:
        return "it is imported from a source tree that was not built"


@functools.cache
def register_targets() -> None:
    """Register the extension's FFI handlers with JAX, after checking that JAX can take them.

    A handler built on newer FFI headers than the running jaxlib's does not merely fail: it
    keeps the whole CUDA backend from starting.
    """
    module = extension()
    if module is None:
        return
    built, running = _ffi_version(module.build_info()), _running_ffi_version()
    if built[0] != running[0] or built[1] > running[1]:
        raise ImportError(
            f"jax_hpc was built for XLA FFI {built[0]}.{built[1]}, but the installed jaxlib "
            f"{importlib.metadata.version('jaxlib')} has {running[0]}.{running[1]}: "
            "upgrade jax and jaxlib, or rebuild jax_hpc"
        )
    for target, handler in module.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform="CUDA")


def _ffi_version(build_info: dict[str, Any]) -> tuple[int, int]:
    return int(build_info["xla_ffi_major"]), int(build_info["xla_ffi_minor"])


@functools.cache
def _running_ffi_version() -> tuple[int, int]:
    """The FFI version of the installed jaxlib, read from the headers it ships."""
    import pathlib
    import re

    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text()
    major, minor = (
        re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")
    )
    if major is None or minor is None:
        raise ImportError(f"jax_hpc: no XLA FFI version found in {header}")
    return int(major[1]), int(minor[1])


@functools.cache
def gpus() -> tuple[Any, ...]:
    """CUDA devices of this process, empty where there are none."""
    try:
        return tuple(jax.devices("cuda"))
    except RuntimeError:
        return ()


@functools.cache
def unusable_reason() -> str | None:
    """Why kernels cannot run on this machine's GPUs; None when they can.

    A host without a GPU gives None: it may lower a program for a machine that has one.
    """
    devices = gpus()
    if not devices:
        return None
    if extension() is None:
        return f"jax_hpc was installed without its CUDA extension: {why_no_extension()}"
    others = {d.compute_capability for d in devices} - {HOPPER}
    if others:
        return (
            f"the kernels are built for compute capability {HOPPER} (Hopper), this machine has "
            f"{', '.join(sorted(others))}"
        )
    return None


def kernel_status(operator: "Operator") -> str:
    """One line for people: which form of an operator runs here, and why."""
    if operator.kernel is None:
        return "XLA form (no kernel in this version)"
    if not gpus():
        return "XLA form (no CUDA device)"
    reason = unusable_reason()
    return f"XLA form ({reason})" if reason else "CUDA kernel"


def info() -> dict[str, Any]:
    """What is installed and what runs here, as plain data (JSON-serialisable).

    Keys: ``version``, ``jax``, ``jaxlib``, ``platform`` (JAX's default backend), ``extension``
    (facts of the compiled part, or why there is none), ``devices`` (one dict per CUDA device of
    JAX; ``kernels`` says whether this build's code runs there, tried by a small launch) and
    ``operators`` (name -> which form runs here, and why).
    """
    module = extension()
    return {
        "version": __version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform": jax.default_backend(),
        "extension": dict(module.build_info()) if module else f"none: {why_no_extension()}",
        "devices": [_device_info(module, device) for device in gpus()],
        "operators": {name: kernel_status(op) for name, op in OPERATORS.items()},
    }


def _device_info(module: Any | None, device: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "id": device.id,
        "kind": device.device_kind,
        "compute_capability": device.compute_capability,
        "multiprocessors": device.core_count,
    }
    if module is not None:
        facts["kernels"] = module.probe(device.local_hardware_id) or "run"
    return facts
