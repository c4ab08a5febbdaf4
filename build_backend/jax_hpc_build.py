"""PEP 517 backend: scikit-build-core, with the CUDA compiler that cuda_toolkit.py chooses."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import cuda_toolkit
from scikit_build_core import build as _skbuild
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, list[str] | str]


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    choice = _choose()
    if choice.source == "off":
        return []
    wheels = list(cuda_toolkit.WHEELS) if choice.source == "wheels" else []
    return [*_skbuild.get_requires_for_build_wheel(config_settings), *wheels]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    return get_requires_for_build_wheel(config_settings)


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings | None = None
) -> str:
    with _configured(config_settings) as settings:
        return _skbuild.prepare_metadata_for_build_wheel(metadata_directory, settings)


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings | None = None
) -> str:
    with _configured(config_settings) as settings:
        return _skbuild.prepare_metadata_for_build_editable(metadata_directory, settings)


def build_wheel(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    with _configured(config_settings) as settings:
        return _skbuild.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    with _configured(config_settings) as settings:
        return _skbuild.build_editable(wheel_directory, settings, metadata_directory)


def _choose() -> cuda_toolkit.Choice:
    try:
        return cuda_toolkit.choose(os.environ, cuda_toolkit.Host.current())
    except cuda_toolkit.ToolkitError as error:
        raise SystemExit(f"jax_hpc: {error}") from None


@contextlib.contextmanager
def _configured(config_settings: Settings | None) -> Iterator[Settings]:
    """Settings and environment of one build; prints what was found and why it matters."""
    choice = _choose()
    settings: Settings = dict(config_settings or {})
    environment = {}
    if choice.source == "toolkit":
        environment["CUDACXX"] = str(choice.nvcc)
    elif choice.source == "wheels":
        tree = cuda_toolkit.wheel_tree(sys.path)
        if tree is None:
            raise SystemExit(
                "jax_hpc: NVIDIA's compiler wheels are not installed in this build environment. "
                "Build without --no-build-isolation, install "
                f"{' '.join(cuda_toolkit.WHEELS)}, or set JAX_HPC_CUDA=off"
            )
        environment["CUDACXX"] = str(tree / "bin" / "nvcc")
        # The wheels keep their libraries in lib/, where this nvcc does not look by itself.
        libraries = [str(tree / "lib"), os.environ.get("LIBRARY_PATH", "")]
        environment["LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    for line in choice.lines():
        print(f"jax_hpc: {line}", flush=True)
    with tempfile.TemporaryDirectory() as folder, _environment(environment):
        if choice.source == "off":
            note = Path(folder, "no_extension.txt")
            note.write_text("; ".join(choice.reasons) + "\n", encoding="utf-8")
            settings["wheel.cmake"] = "false"
            settings["wheel.py-api"] = "py3"
            settings[f"wheel.force-include.{note}"] = "/platlib/jax_hpc/no_extension.txt"
        yield settings


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
