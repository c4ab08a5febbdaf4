"""Looking into compiled programs: what is copied, what waits for the host."""

import re
from collections.abc import Iterable
from typing import Any

import jax

_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<type>\(.*?\)|\S+) (?P<op>[a-z][\w\-]*)\("
)
_HOST = ("infeed", "outfeed", "send", "recv", "host-callback", "xla_python", "xla_ffi_python")
# What may produce an array of a cache's shape without moving the cache.
_FREE = frozenset(
    "parameter get-tuple-element tuple while conditional call custom-call bitcast scatter "
    "dynamic-update-slice opt-barrier optimization-barrier".split()
)
_IN_PLACE = ("scatter(", "dynamic-update-slice(", "bitcast(", "custom-call(")


def cache_copies(compiled: Any, caches: Iterable[jax.Array]) -> list[str]:
    """Instructions of a compiled program that write a whole array of a cache's shape.

    In-place updates (scatter, dynamic-update-slice, custom calls that alias) do not count; a
    copy, a conversion or a fusion without an in-place update does. An empty list means that the
    program moves only the rows it writes.

    Args:
      compiled: ``jax.jit(f).lower(...).compile()``.
      caches: the arrays to look for, such as ``jax.tree.leaves(cache)``.
    """
    sizes = {",".join(map(str, array.shape)) for array in caches}
    computations = _computations(compiled.as_text())
    # Fused instructions have no buffer of their own; the fusion that calls them does.
    fused = set(re.findall(r"fusion\(.*calls=%?([\w.\-]+)", compiled.as_text()))
    found = []
    for name, lines in computations.items():
        if name in fused:
            continue
        for line in lines:
            match = _INSTRUCTION.match(line)
            if match is None or not any(f"[{size}]" in match["type"] for size in sizes):
                continue
            if match["op"] in _FREE or _fusion_in_place(match["op"], line, computations):
                continue
            found.append(line.strip())
    return found


def host_transfers(compiled: Any) -> list[str]:
    """Instructions of a compiled program that exchange data with the host."""
    return [
        line.strip()
        for line in compiled.as_text().splitlines()
        if (match := _INSTRUCTION.match(line))
        and (
            match["op"].startswith(_HOST) or any(f'custom_call_target="{h}' in line for h in _HOST)
        )
    ]


def loops_without_trip_count(compiled: Any) -> list[str]:
    """While loops whose number of steps is not static.

    On a GPU such a loop copies its predicate to the host and waits for it in every step.
    """
    return [
        line.strip()
        for line in compiled.as_text().splitlines()
        if (match := _INSTRUCTION.match(line))
        and match["op"] == "while"
        and "known_trip_count" not in line
    ]


def _fusion_in_place(op: str, line: str, computations: dict[str, list[str]]) -> bool:
    if op != "fusion":
        return False
    called = re.search(r"calls=%?([\w.\-]+)", line)
    body = computations.get(called[1], []) if called else []
    root = next((line for line in body if line.lstrip().startswith("ROOT")), "")
    return any(operation in root for operation in _IN_PLACE) or (
        " tuple(" in root and any(o in line for line in body for o in _IN_PLACE[:2])
    )


def _computations(text: str) -> dict[str, list[str]]:
    """Lines of each computation of an HLO module by its name."""
    result: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        header = re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if header:
            current = result.setdefault(header[1], [])
        else:
            current.append(line)
    return result
