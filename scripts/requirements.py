"""Prints what pyproject.toml requires, one line each: `requirements.py build core test dev ...`.

`build` is what the build backend needs first, `build-more` what it then asks for on this machine
(cmake, ninja, NVIDIA's compiler wheels), `core` the run-time dependencies; any other word is the
name of an extra.
"""

import contextlib
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def requirements(group: str, pyproject: dict[str, Any]) -> list[str]:
    """The requirement lines of one group, references to the project's own extras resolved."""
    project = pyproject["project"]
    if group == "build":
        return pyproject["build-system"]["requires"]
    if group == "build-more":
        return build_more()
    if group == "core":
        return project["dependencies"]
    lines = []
    for line in project["optional-dependencies"][group]:
        own = re.fullmatch(rf"{project['name']}\[(.+)\]", line)
        names = re.split(r"\s*,\s*", own[1]) if own else []
        lines += [r for name in names for r in requirements(name, pyproject)] if own else [line]
    return lines


def build_more() -> list[str]:
    """What the backend asks for beyond `build`; its own messages go to stderr."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "build_backend"))
    import jax_hpc_build

    with contextlib.redirect_stdout(sys.stderr):
        return jax_hpc_build.get_requires_for_build_editable()


if __name__ == "__main__":
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for word in sys.argv[1:]:
        print("\n".join(requirements(word, document)))
