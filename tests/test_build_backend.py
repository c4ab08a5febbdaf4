"""How a build chooses its CUDA compiler, and what a build without one packs."""

import tomllib
import zipfile
from pathlib import Path

import cuda_toolkit
import pytest
from cuda_toolkit import Host, ToolkitError, choose

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A Linux x86-64 machine that could build, with no nvcc in the usual place."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    return Host(
        platform="linux-x86_64",
        libc="glibc",
        python_headers=tmp_path / "include",
        stable_abi=True,
        default_nvcc=tmp_path / "usr-local-cuda" / "nvcc",
    )


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def nvcc(path: Path, version: str) -> Path:
    return script(path, f"echo 'Cuda compilation tools, release {version}, V{version}.88'")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Variables with a PATH that holds a C++ compiler and nothing else."""
    script(tmp_path / "bin" / "c++", "exit 0")
    return {"PATH": str(tmp_path / "bin")}


def test_nvcc_on_path(env, host, tmp_path) -> None:
    found = nvcc(tmp_path / "bin" / "nvcc", "13.0")
    choice = choose(env, host)
    assert (choice.source, choice.nvcc) == ("toolkit", found)
    assert choice.lines() == [
        f"{found} is CUDA 13.0",
        f"building the CUDA extension with {found}",
    ]


def test_cudacxx_comes_before_path_and_the_usual_place_last(env, host, tmp_path) -> None:
    usual = nvcc(host.default_nvcc, "13.1")
    assert choose(env, host).nvcc == usual
    on_path = nvcc(tmp_path / "bin" / "nvcc", "13.0")
    assert choose(env, host).nvcc == on_path
    named = nvcc(tmp_path / "mine" / "nvcc", "13.2")
    assert choose(env | {"CUDACXX": str(named)}, host).nvcc == named
    home = nvcc(tmp_path / "home" / "bin" / "nvcc", "14.0")
    on_path.unlink()
    assert choose(env | {"CUDA_HOME": str(tmp_path / "home")}, host).nvcc == home


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("echo 'release 12.9, V12.9.1'", "CUDA 12.9, older than 13.0"),
        ("echo 'release 13.0, V13.0.88'; exit 1", "does not run (exit status 1)"),
        ("exit 127", "does not run (exit status 127)"),
        ("echo hello", "does not run (exit status 0)"),
    ],
)
def test_an_nvcc_that_will_not_do_is_passed_over(body, word, env, host, tmp_path) -> None:
    script(tmp_path / "bin" / "nvcc", body)
    choice = choose(env, host)
    assert choice.source == "wheels"
    assert word in choice.lines()[0]
    usual = nvcc(host.default_nvcc, "13.0")
    assert choose(env, host).nvcc == usual


def test_a_named_nvcc_that_is_missing_is_said(env, host, tmp_path) -> None:
    choice = choose(env | {"CUDACXX": str(tmp_path / "gone")}, host)
    assert choice.source == "wheels"
    assert f"{tmp_path / 'gone'} does not run" in choice.lines()[0]


def test_no_nvcc_means_wheels(env, host) -> None:
    choice = choose(env, host)
    assert (choice.source, choice.nvcc) == ("wheels", None)
    assert "found no nvcc" in choice.lines()[0]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"platform": "darwin-arm64", "libc": ""}, "Linux x86-64"),
        ({"platform": "linux-aarch64"}, "linux-aarch64"),
        ({"libc": ""}, "glibc"),
        ({"stable_abi": False}, "stable ABI"),
        ({"python_headers": Path("/nonexistent")}, "no Python.h in /nonexistent"),
    ],
)
def test_obstacles(changes, word, env, host, tmp_path) -> None:
    nvcc(tmp_path / "bin" / "nvcc", "13.0")
    blocked = Host(**(vars(host) | changes))
    choice = choose(env, blocked)
    assert choice.source == "off" and word in choice.reasons[0]
    assert "without the CUDA extension" in choice.lines()[-1]
    with pytest.raises(ToolkitError, match="JAX_HPC_CUDA=toolkit, but"):
        choose(env | {"JAX_HPC_CUDA": "toolkit"}, blocked)


def test_no_cxx_compiler(env, host, tmp_path) -> None:
    (tmp_path / "bin" / "c++").unlink()
    assert "no C++ compiler" in choose(env, host).reasons[0]
    script(tmp_path / "bin" / "clang++", "exit 0")
    assert choose(env, host).source == "wheels"
    assert "no C++ compiler (mine)" in choose(env | {"CXX": "mine"}, host).reasons[0]


def test_environment_overrides(env, host, tmp_path) -> None:
    with pytest.raises(ToolkitError, match="JAX_HPC_CUDA=toolkit, but found no nvcc"):
        choose(env | {"JAX_HPC_CUDA": "toolkit"}, host)
    found = nvcc(tmp_path / "bin" / "nvcc", "13.0")
    assert choose(env | {"JAX_HPC_CUDA": "auto"}, host).nvcc == found
    assert choose(env | {"JAX_HPC_CUDA": "toolkit"}, host).nvcc == found
    assert choose(env | {"JAX_HPC_CUDA": "wheels"}, host).source == "wheels"
    assert choose(env | {"JAX_HPC_CUDA": "off"}, host).source == "off"
    with pytest.raises(ToolkitError, match="must be one of auto, toolkit, wheels, off, got 'yes'"):
        choose(env | {"JAX_HPC_CUDA": "yes"}, host)


def test_wheel_tree_must_be_complete(tmp_path) -> None:
    tree = tmp_path / "nvidia" / "cu13"
    for name in ("bin/nvcc", "nvvm/bin/cicc", "include/crt/host_defines.h"):
        script(tree / name, "")
    search = [str(tmp_path / "elsewhere"), str(tmp_path)]
    assert cuda_toolkit.wheel_tree(search) is None
    script(tree / "lib" / "libcudart_static.a", "")
    assert cuda_toolkit.wheel_tree(search) == tree


def test_backend_asks_for_the_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax_hpc_build

    monkeypatch.chdir(ROOT)
    for source, expected in (("wheels", set(cuda_toolkit.WHEELS)), ("toolkit", set())):
        choice = cuda_toolkit.Choice(source, Path("nvcc"), ())
        monkeypatch.setattr(cuda_toolkit, "choose", lambda *_, choice=choice: choice)
        asked = set(jax_hpc_build.get_requires_for_build_wheel())
        assert {line for line in asked if line.startswith("nvidia-")} == expected
        assert asked == set(jax_hpc_build.get_requires_for_build_editable())


def test_backend_sets_the_compiler_for_the_build_only(monkeypatch, tmp_path) -> None:
    import os

    import jax_hpc_build

    for name in ("bin/nvcc", "nvvm/bin/cicc", "include/crt/x.h", "lib/libcudart_static.a"):
        script(tmp_path / "nvidia" / "cu13" / name, "")
    tree = tmp_path / "nvidia" / "cu13"
    monkeypatch.setattr(cuda_toolkit, "choose", lambda *_: cuda_toolkit.Choice("wheels", None, ()))
    monkeypatch.setenv("LIBRARY_PATH", "/mine")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    before = dict(os.environ)
    with jax_hpc_build._configured({"build-dir": "b"}) as settings:
        assert os.environ["CUDACXX"] == str(tree / "bin" / "nvcc")
        assert os.environ["LIBRARY_PATH"] == f"{tree / 'lib'}:/mine"
        assert settings == {"build-dir": "b"}
    assert dict(os.environ) == before
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(SystemExit, match="compiler wheels are not installed"):
        with jax_hpc_build._configured(None):
            pass


def test_a_build_without_extension_packs_every_module_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import jax_hpc_build

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_HPC_CUDA", "off")
    assert jax_hpc_build.get_requires_for_build_wheel() == []
    name = jax_hpc_build.build_wheel(str(tmp_path))
    assert name.endswith("-py3-none-any.whl")
    assert "jax_hpc: installing without the CUDA extension" in capfd.readouterr().out
    with zipfile.ZipFile(tmp_path / name) as wheel:
        packed = set(wheel.namelist())
        note = wheel.read("jax_hpc/_no_extension.py").decode()
    assert "REASON = 'JAX_HPC_CUDA=off'" in note
    assert sources("jax_hpc", "jax_hpc") | sources("models", "jax_hpc/models") <= packed
    assert {"jax_hpc/py.typed", "jax_hpc/_ext.pyi"} <= packed
    assert not [p for p in packed if p.endswith((".so", ".safetensors")) or "tests/" in p]


def sources(folder: str, package: str) -> set[str]:
    """The Python files of a folder of the checkout, as paths in the wheel."""
    root = ROOT / folder
    return {f"{package}/{path.relative_to(root).as_posix()}" for path in root.rglob("*.py")}


def test_pre_commit_and_pyproject_pin_the_same_versions() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = [p for p in pyproject["project"]["optional-dependencies"]["dev"] if "==" in p]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    for tool in ("ruff", "clang-format"):
        (pin,) = [p for p in pins if p.startswith(f"{tool}==")]
        assert f'additional_dependencies: ["{pin}"]' in hooks
