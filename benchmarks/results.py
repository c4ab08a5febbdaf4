"""Files of results: a meta row, then one row a case and implementation."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, row_key

HERE = Path(__file__).parent
BASELINES = HERE / "baselines" / "h200.jsonl"
RESULTS = HERE / "results" / "h200"
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
SAME_DEVICE = ("device", "driver", "host", "jax", "jaxlib")
"""Meta fields that all rows of a file share, ``host`` only where the host is what is measured;
sources may differ, and each row has its own."""


def read_rows(path: Path) -> list[Row]:
    """Rows of a jsonl file; empty where there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def read_results(path: Path) -> tuple[Row | None, list[Row]]:
    """Meta row and the newest row of each case and implementation."""
    meta, newest = None, {}
    for row in read_rows(path):
        if "meta" in row:
            meta = row["meta"]
        else:
            newest[row_key(row)] = row
    return meta, list(newest.values())


class Results:
    """A results file that is added to, one row as soon as it is measured."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta, rows = read_results(path)
        self._rows = {row_key(row): row for row in rows}

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def start(self, meta: Row) -> None:
        """Write the meta row first, and each row once; refuse rows of another device."""
        if self.meta is not None:
            for key in SAME_DEVICE:
                if self.meta.get(key) != meta.get(key):
                    raise ValueError(
                        f"{self.path} holds rows of {key} {self.meta.get(key)!r}, this is "
                        f"{meta.get(key)!r}: write to another file"
                    )
        self.meta = meta
        lines = [json.dumps(row) + "\n" for row in [{"meta": meta}, *self._rows.values()]]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text("".join(lines))
        scratch.replace(self.path)

    def add(self, row: Row) -> None:
        self._rows[row_key(row)] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def has(self, row: Row, sources_hash: str, processes: int) -> bool:
        """Whether a row is there, from these sources and at least so many processes."""
        found = self._rows.get(row_key(row))
        return (
            found is not None
            and found["sources_hash"] == sources_hash
            and found["processes"] >= processes
        )


def sources_hash(operators: Sequence[str], root: Path = HERE.parent) -> str:
    """Hash of the files that an operator's speed depends on."""
    digest = hashlib.sha256()
    for path in sources(operators, root):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def sources(operators: Sequence[str], root: Path = HERE.parent) -> list[Path]:
    """Operators' own files, and of cuda/ whatever these include, at any remove."""
    cuda = root / "cuda"
    places = [root / "jax_hpc" / "ops" / operator for operator in operators]
    places += [cuda / operator for operator in operators]
    files = [path for place in places for path in place.rglob("*")]
    files += [cuda / "ffi" / f"{operator}.cc" for operator in operators]
    found = {path for path in files if path.is_file() and "__pycache__" not in path.parts}
    pending = [path for path in found if path.is_relative_to(cuda)]
    while pending:
        for name in INCLUDE.findall(pending.pop().read_text()):
            # What a header declares is defined beside it.
            beside = {cuda / name, *((cuda / name).with_suffix(end) for end in (".cu", ".cc"))}
            new = {path for path in beside if path.is_file()} - found
            found |= new
            pending += new
    return sorted(found)


def summary_of(samples: Sequence[float]) -> dict[str, Any]:
    """Median over processes, and how far apart they lie."""
    ordered = sorted(samples)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else sum(ordered[middle - 1 : middle + 1]) / 2
    return {
        "us": round(median, 3),
        "processes": len(ordered),
        "spread": round((ordered[-1] - ordered[0]) / median, 4),
    }
