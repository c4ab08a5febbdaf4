"""Stub of the compiled module (cuda/ffi/bind.cc); absent where jax_hpc was built without CUDA."""

from typing import TypedDict

class BuildInfo(TypedDict):
    version: str
    cuda: str
    architecture: str
    xla_ffi_major: int
    xla_ffi_minor: int
    compiler: str

class DeviceInfo(TypedDict):
    ordinal: int
    name: str
    compute_capability: str
    multiprocessors: int
    l2_bytes: int
    memory_bytes: int

def registrations() -> dict[str, object]:
    """FFI target name -> handler capsule, for ``jax.ffi.register_ffi_target``."""

def build_info() -> BuildInfo:
    """What this extension was built with."""

def device_info() -> list[DeviceInfo]:
    """One entry per CUDA device; empty, never an error, without a driver."""

def no_device_reason() -> str:
    """Why ``device_info()`` is empty; "" when it is not."""

def probe(ordinal: int) -> str:
    """Run a small kernel on a device: "" when this build's code runs there, else why not."""
