"""What a benchmark row is: its case, the way it was computed, and the least time it could take."""

import dataclasses
import fnmatch
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.timing import Workload

Row = dict[str, Any]
Case = dict[str, Any]

CASE_KEYS: Mapping[str, tuple[str, ...]] = {
    "router": ("shape", "m"),
    "decode-bf16": ("heads", "case"),
    "decode-fp8": ("heads", "case"),
    "moe-fp8": ("shape", "bs"),
    "moe-bf16": ("shape", "bs"),
    "prefill-bf16": ("case",),
    "prefill-fp8": ("case",),
    "prologue-bf16": ("heads", "T"),
    "prologue-fp8": ("heads", "T"),
}
"""The keys that tell the cases of an op apart, in results and in the recorded baselines."""
MODULES: Mapping[str, str] = {"router": "benchmarks.router"}
"""The module of each op that can be measured; it holds a BENCHMARK."""
OPTIONS = ("terms", "format")
"""Keys by which rows of one case and implementation differ further."""


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Everything about one op.

    operators: folders of the operators whose sources decide the result.
    cases: one dict of the op's CASE_KEYS each.
    impls: what can be measured, as ``name`` or ``name:option``.
    default_impls: what is measured unless other impls are asked for.
    fields: (case, impl) -> the row's fields besides the case keys and the time.
    workload: (case, impl) -> what is timed.
    judged: names of impls that are compared with peers.
    remeasured: impl -> the recorded peer that it measures again, and replaces.
    no_rivals: recorded peers that do something else, or less exactly.
    subsets: label -> which cases a further geometric mean is taken over.
    option: the key that ``:option`` sets, with its default.
    """

    op: str
    operators: tuple[str, ...]
    cases: Sequence[Case]
    impls: tuple[str, ...]
    default_impls: tuple[str, ...]
    fields: Callable[[Case, str], Row]
    workload: Callable[[Case, str], Workload]
    judged: frozenset[str]
    remeasured: Mapping[str, str] = dataclasses.field(default_factory=dict)
    no_rivals: frozenset[str] = frozenset()
    subsets: Mapping[str, Callable[[Case], bool]] = dataclasses.field(default_factory=dict)
    option: tuple[str, Any] = ("", None)

    def row(self, case: Case, impl: str) -> Row:
        """A row without its time."""
        return {"op": self.op, **case, **self.fields(case, impl)}

    def label(self, row: Row) -> str:
        """An impl as it is asked for."""
        key, default = self.option
        value = row.get(key)
        return row["impl"] if value in (None, default) else f"{row['impl']}:{value}"

    def select_impls(self, impls: str | None) -> list[str]:
        """Impls from a comma-separated list."""
        names = impls.split(",") if impls else list(self.default_impls)
        unknown = [name for name in names if name not in self.impls]
        if unknown:
            raise ValueError(f"op {self.op} has impls {', '.join(self.impls)}; got {unknown}")
        return names


def load(op: str) -> Benchmark:
    if op not in MODULES:
        raise ValueError(f"no benchmark of op {op!r}; there are: {', '.join(MODULES)}")
    return importlib.import_module(MODULES[op]).BENCHMARK


def case_of(row: Row) -> Case:
    return {key: row[key] for key in CASE_KEYS[row["op"]]}


def case_name(case: Case) -> str:
    """``hy3/64`` for shape hy3, m 64: how a case is printed and asked for."""
    return "/".join(str(value) for value in case.values())


def row_key(row: Row) -> tuple[Any, ...]:
    """What makes two rows measurements of one thing."""
    options = tuple(row.get(option) for option in OPTIONS)
    return (row["op"], *case_of(row).values(), row.get("impl", row.get("peer")), *options)


def select(cases: Iterable[Case], patterns: str | None) -> list[Case]:
    """Cases whose names match one of the comma-separated patterns, such as ``hy3/*,*/64``."""
    cases = list(cases)
    if patterns is None:
        return cases
    wanted = patterns.split(",")
    for pattern in wanted:
        if not any(fnmatch.fnmatchcase(case_name(case), pattern) for case in cases):
            raise ValueError(
                f"no case matches {pattern!r}; cases: {', '.join(map(case_name, cases))}"
            )
    return [c for c in cases if any(fnmatch.fnmatchcase(case_name(c), p) for p in wanted)]


def floor_us(num_bytes: float) -> float:
    """Bytes that must move at the copy bandwidth measured on an H200, 4.3 TB/s."""
    return num_bytes / 4.3e6


def practical_floor_us(num_bytes: float) -> float:
    """The measured time of one cold pass over so many bytes in one launch, standing alone.

    Inside a graph a small one can be quicker.
    """
    return 4.0 + num_bytes / 4.5e6


def floors(num_bytes: float) -> Row:
    """The floor fields of a memory-bound row."""
    return {
        "floor_us": round(floor_us(num_bytes), 2),
        "practical_floor_us": round(practical_floor_us(num_bytes), 2),
    }
