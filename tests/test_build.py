"""The installed package: the compiled extension, its facts and its gates."""

import ctypes
import importlib
import importlib.metadata
import re
import subprocess
import sys
from types import ModuleType

import pytest

from jax_hpc import _registry


@pytest.fixture(scope="module")
def ext() -> ModuleType:
    try:
        return importlib.import_module("jax_hpc._ext")
    except ModuleNotFoundError:
        # The build leaves a reason wherever it leaves the extension out; anything else is a bug.
        reason = importlib.import_module("jax_hpc._no_extension").REASON
        pytest.skip(f"jax_hpc was built without its extension: {reason}")


def test_build_info(ext: ModuleType) -> None:
    info = ext.build_info()
    assert info["version"] == importlib.metadata.version("jax-hpc")
    assert tuple(map(int, info["cuda"].split("."))) >= (13, 0)
    assert info["architecture"] == "90a-real"
    assert re.fullmatch(r"(GNU|Clang) \d+\.\d+\.\d+", info["compiler"])


def test_every_target_belongs_to_an_operator(ext: ModuleType) -> None:
    kernels = {op.kernel.target for op in _registry.OPERATORS.values() if op.kernel is not None}
    assert set(ext.registrations()) == kernels
    for target in kernels:
        assert re.fullmatch(r"jax_hpc\.[a-z][a-z0-9_]*\.v[1-9]\d*", target)


def test_devices_or_a_reason(ext: ModuleType) -> None:
    devices, reason = ext.device_info(), ext.no_device_reason()
    assert bool(devices) != bool(reason), (devices, reason)
    for ordinal, device in enumerate(devices):
        assert device["ordinal"] == ordinal
        assert device["multiprocessors"] > 0 and device["memory_bytes"] > device["l2_bytes"] > 0


def test_probe_of_a_missing_device_says_why(ext: ModuleType) -> None:
    assert re.search("CUDA|device", ext.probe(len(ext.device_info())))


@pytest.mark.gpu
def test_probe_runs_on_hopper(ext: ModuleType) -> None:
    hopper = [d for d in ext.device_info() if d["compute_capability"] == "9.0"]
    assert hopper, ext.device_info() or ext.no_device_reason()
    assert [ext.probe(device["ordinal"]) for device in hopper] == [""] * len(hopper)


def test_the_extension_keeps_its_cuda_runtime_to_itself(ext: ModuleType) -> None:
    library = ctypes.CDLL(ext.__file__)
    assert hasattr(library, "PyInit__ext")
    assert not hasattr(library, "cudaMalloc")


def test_ffi_version_is_not_newer_than_the_oldest_jaxlib_allowed(ext: ModuleType) -> None:
    info = ext.build_info()
    built = info["xla_ffi_major"], info["xla_ffi_minor"]
    assert built <= _registry._running_ffi_version()
    if importlib.metadata.version("jaxlib") == "0.11.2":
        assert built == (0, 4)


def test_import_needs_neither_the_checkout_nor_the_extras(tmp_path) -> None:
    code = (
        "import sys, jax_hpc, jax_hpc.models; "
        "print([m for m in ('safetensors', 'tokenizers', 'jinja2') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
