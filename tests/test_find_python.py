"""The Makefile's search for a Python: a candidate counts only if it runs and is new enough."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "find_python.sh"
GOOD = f'exec "{sys.executable}" "$@"'
SHIM = "echo 'pyenv: command not found' >&2; exit 127"
OLD = "exit 1"  # what the version check makes of an older Python


def fake(path: Path, body: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def find(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "bin").mkdir(exist_ok=True)
    env = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)} | variables
    return subprocess.run(
        ["/bin/bash", SCRIPT], env=env, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("broken", [SHIM, OLD])
def test_order_and_candidates_that_do_not_run(broken: str, tmp_path: Path) -> None:
    second = fake(tmp_path / ".pyenv/versions/3.12.1/bin/python", GOOD)
    fake(tmp_path / ".pyenv/versions/3.11.7/bin/python", OLD)
    assert find(tmp_path).stdout.strip() == second
    plain = fake(tmp_path / "bin/python3", GOOD)
    assert find(tmp_path).stdout.strip() == plain
    fake(tmp_path / "bin/python3.13", broken)
    assert find(tmp_path).stdout.strip() == plain
    versioned = fake(tmp_path / "bin/python3.12", GOOD)
    assert find(tmp_path).stdout.strip() == versioned
    newest = fake(tmp_path / "bin/python3.13", GOOD)
    assert find(tmp_path).stdout.strip() == newest
    mine = fake(tmp_path / "with space/python", GOOD)
    assert find(tmp_path, PYTHON=mine).stdout.strip() == mine
    assert find(tmp_path, PYTHON="/nonexistent").stdout.strip() == newest


def test_pyenv_root(tmp_path: Path) -> None:
    found = fake(tmp_path / "root/versions/3.13.0/bin/python", GOOD)
    assert find(tmp_path, PYENV_ROOT=str(tmp_path / "root")).stdout.strip() == found


def test_none_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    shim = fake(tmp_path / "bin/python3.12", SHIM)
    run = find(tmp_path, PYTHON=shim)
    assert run.returncode == 1 and run.stdout == ""
    assert "No usable Python 3.12 or newer" in run.stderr
    assert f"  {shim}\n" in run.stderr and "make PYTHON=" in run.stderr
