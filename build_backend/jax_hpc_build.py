"""PEP 517 backend: scikit-build-core, with the CUDA compiler that cuda_toolkit.py chooses."""

import contextlib
import os
import sys
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
    _say(choice)
    if choice.source == "off":
        return []
    wheels = list(cuda_toolkit.WHEELS) if choice.source == "wheels" else []
    return [*_skbuild.get_requires_for_build_wheel(config_settings), *wheels]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    return get_requires_for_build_wheel(config_settings)


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings | None = None
) -> str:
    with _configured(config_settings, quiet=True) as settings:
        return _skbuild.prepare_metadata_for_build_wheel(metadata_directory, settings)


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings | None = None
) -> str:
    with _configured(config_settings, quiet=True) as settings:
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


def _say(choice: cuda_toolkit.Choice) -> None:
    for line in choice.lines():
        print(f"jax_hpc: {line}", flush=True)


@contextlib.contextmanager
def _configured(config_settings: Settings | None, quiet: bool = False) -> Iterator[Settings]:
    """Settings and environment of one build, by the compiler chosen."""
    choice = _choose()
    if not quiet:
        _say(choice)
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
    if choice.source == "off":
        settings |= _without_extension(choice)
    with _environment(environment):
        yield settings


def _without_extension(choice: cuda_toolkit.Choice) -> Settings:
    """Settings of a pure Python build, which carries the reason for `jax-hpc info` to show."""
    note = Path("build", "_no_extension.py")
    note.parent.mkdir(exist_ok=True)
    reason = "; ".join(choice.reasons)
    note.write_text(f'"""Written by the build."""\n\nREASON = {reason!r}\n', encoding="utf-8")
    return {
        "wheel.cmake": "false",
        "wheel.py-api": "py3",
        f"wheel.force-include.{note.as_posix()}": "jax_hpc/_no_extension.py",
    }


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
