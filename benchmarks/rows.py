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
    "rms-norm": ("H", "T"),
    "generate": ("model", "layers", "batch", "prompt", "new", "kv"),
    "loading": ("arrays", "quantize", "layers"),
}
"""The keys that tell the cases of an op apart, in results and in the recorded baselines."""
MODULES: Mapping[str, str] = {
    "router": "benchmarks.router",
    "decode-bf16": "benchmarks.decode",
    "decode-fp8": "benchmarks.decode",
    "prefill-bf16": "benchmarks.prefill",
    "prefill-fp8": "benchmarks.prefill",
    "prologue-bf16": "benchmarks.prologue",
    "prologue-fp8": "benchmarks.prologue",
    "rms-norm": "benchmarks.norm",
    "moe-fp8": "benchmarks.moe",
    "moe-bf16": "benchmarks.moe",
}
"""The module of each op that can be measured; its BENCHMARKS has it by name."""
OPTIONS = ("terms", "format")
"""Keys by which rows of one case and implementation differ further."""


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Everything about one op.

    operators: impl -> the operators whose sources decide its time.
    cases: one dict of the op's CASE_KEYS each.
    impls: what can be measured, as ``name`` or ``name:option``.
    default: what is measured unless other impls are asked for, as ``--impls`` lists it.
    fields: (case, impl) -> the row's fields besides the case keys and the time.
    workload: (case, impl) -> what is timed.
    rivals: name of an impl that is judged -> names of impls that it competes with, measured in
        the same case with the same option or none.
    recorded: judged impls that compete with the recorded peers too.
    remeasured: impl -> the recorded peer that it measures again, and replaces.
    no_rivals: recorded peers that do something else, or less exactly.
    subsets: label -> which cases a further geometric mean is taken over.
    option: the key that ``:option`` sets, with its default.
    peer_options: recorded peer -> the value of that key which it competes with; all by default.
    """

    op: str
    operators: Callable[[str], tuple[str, ...]]
    cases: Sequence[Case]
    impls: tuple[str, ...]
    default: tuple[str, ...]
    fields: Callable[[Case, str], Row]
    workload: Callable[[Case, str], Workload]
    rivals: Mapping[str, tuple[str, ...]]
    recorded: frozenset[str] = frozenset()
    remeasured: Mapping[str, str] = dataclasses.field(default_factory=dict)
    no_rivals: frozenset[str] = frozenset()
    subsets: Mapping[str, Callable[[Case], bool]] = dataclasses.field(default_factory=dict)
    option: tuple[str, Any] = ("", None)
    peer_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def row(self, case: Case, impl: str) -> Row:
        """A row without its time."""
        return {"op": self.op, **case, **self.fields(case, impl)}

    def label(self, row: Row) -> str:
        """An impl as it is asked for."""
        key, default = self.option
        value = row.get(key)
        return row["impl"] if value in (None, default) else f"{row['impl']}:{value}"

    def select_jobs(self, rows: str | None, impls: str | None) -> list[tuple[Case, str]]:
        """Cases by patterns, each with the impls of a comma-separated list.

        ``impl@patterns`` is an impl for some cases only: ``cuda:3@hy3/*|*/64``.
        """
        wanted = [name.partition("@") for name in (impls.split(",") if impls else self.default)]
        unknown = [name for name, _, _ in wanted if name not in self.impls]
        if unknown:
            raise ValueError(f"op {self.op} has impls {', '.join(self.impls)}; got {unknown}")
        return [
            (case, name)
            for case in select(self.cases, rows)
            for name, _, patterns in wanted
            if _matches(case, (patterns or "*").split("|"))
        ]


def load(op: str) -> Benchmark:
    if op not in MODULES:
        raise ValueError(f"no benchmark of op {op!r}; there are: {', '.join(MODULES)}")
    return importlib.import_module(MODULES[op]).BENCHMARKS[op]


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
        if not any(_matches(case, [pattern]) for case in cases):
            raise ValueError(
                f"no case matches {pattern!r}; cases: {', '.join(map(case_name, cases))}"
            )
    return [case for case in cases if _matches(case, wanted)]


def _matches(case: Case, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(case_name(case), pattern) for pattern in patterns)


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
