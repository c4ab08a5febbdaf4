"""Results beside the recorded peers: ``python -m benchmarks.report [--op router] [--plots]``."""

import argparse
import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import rows as rows_module
from benchmarks.results import BASELINES, RESULTS, read_results, read_rows, sources_hash
from benchmarks.rows import Benchmark, Row, case_name, case_of, load


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row of ours and the fastest peer that does the same; the peer is None where none is."""

    row: Row
    label: str
    peer: str | None
    peer_us: float | None

    @property
    def ratio(self) -> float | None:
        """The peer's time over ours: above 1 we are faster."""
        return None if self.peer_us is None else self.peer_us / self.row["us"]

    @property
    def slower(self) -> bool:
        """Slower than the peer by more than measurements differ."""
        if self.peer_us is None:
            return False
        return self.row["us"] > self.peer_us + max(0.03 * self.peer_us, 0.3)


def peers_of(
    benchmark: Benchmark, row: Row, ours: Iterable[Row], baselines: Iterable[Row]
) -> list[tuple[float, str]]:
    """(time, name) of what a row competes with, fastest first.

    Its rivals, measured together with it, and recorded peers that were not measured again.
    """
    case, option = case_of(row), benchmark.option[0]
    here = {
        other["impl"]: other["us"]
        for other in ours
        if other["impl"] in benchmark.rivals[row["impl"]]
        and case_of(other) == case
        and other.get(option) in (None, row.get(option))
    }
    replaced = {benchmark.remeasured.get(name) for name in here} | benchmark.no_rivals
    recorded = [
        (other["us"], other["peer"])
        for other in baselines
        if row["impl"] in benchmark.recorded
        and other["op"] == row["op"]
        and case_of(other) == case
        and other["peer"] not in replaced
        and benchmark.peer_options.get(other["peer"]) in (None, row.get(option))
    ]
    return sorted([(us, name) for name, us in here.items()] + recorded)


def compare(
    benchmark: Benchmark, ours: Sequence[Row], baselines: Sequence[Row]
) -> list[Comparison]:
    """Every row that is judged, in the order of the benchmark's cases."""
    order = {case_name(case): i for i, case in enumerate(benchmark.cases)}
    judged = [row for row in ours if row["impl"] in benchmark.rivals]
    judged.sort(key=lambda r: (benchmark.label(r), order.get(case_name(case_of(r)), len(order))))
    comparisons = []
    for row in judged:
        us, name = next(iter(peers_of(benchmark, row, ours, baselines)), (None, None))
        comparisons.append(Comparison(row, benchmark.label(row), name, us))
    return comparisons


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def line(label: str, row: Row, comparison: Comparison | None = None) -> str:
    """One aligned line about a row."""
    text = (
        f"{case_name(case_of(row)):<22}{label:<16}{row['us']:>10.2f} us"
        f"  floor {row['floor_us']:>8.2f}  practical {row['practical_floor_us']:>8.2f}"
    )
    if comparison is not None and comparison.ratio is not None:
        text += f"  {comparison.ratio:>6.2f}x of {comparison.peer} {comparison.peer_us:.2f}"
        text += "  SLOWER" if comparison.slower else ""
    return text


def summary(benchmark: Benchmark, comparisons: Sequence[Comparison]) -> list[str]:
    """Geometric means of peer over ours per implementation, over all cases and subsets."""
    lines = []
    for label in dict.fromkeys(c.label for c in comparisons):
        mine = [c for c in comparisons if c.label == label and c.ratio is not None]
        if not mine:
            continue
        key = rows_module.CASE_KEYS[benchmark.op][0]
        groups = {"all": mine}
        for name, includes in benchmark.subsets.items():
            groups[name] = [c for c in mine if includes(case_of(c.row))]
        for value in dict.fromkeys(c.row[key] for c in mine):
            groups[str(value)] = [c for c in mine if c.row[key] == value]
        for name, members in groups.items():
            if members:
                ratios = {case_name(case_of(c.row)): c.ratio or 1.0 for c in members}
                least = min(ratios, key=lambda case: ratios[case])
                slower = sum(c.slower for c in members)
                lines.append(
                    f"{label:<16}{name:<16}{len(members):>4} rows   geometric mean "
                    f"{geometric_mean([*ratios.values()]):>6.2f}x   least {ratios[least]:>6.2f}x "
                    f"({least})   slower than the best peer: {slower}"
                )
    return lines


def report(op: str, results: Path, baselines: Path, patterns: str | None = None) -> str:
    """The whole report of one op as text."""
    benchmark = load(op)
    meta, ours = read_results(results)
    if meta is None:
        return f"{op}: no results in {results}"
    names = {case_name(case) for case in rows_module.select(benchmark.cases, patterns)}
    ours = [row for row in ours if case_name(case_of(row)) in names]
    operators = [benchmark.operators(benchmark.label(row)) for row in ours]
    current = {names: sources_hash(names) for names in set(operators)}
    stale = sum(
        row["sources_hash"] != current[names] for row, names in zip(ours, operators, strict=True)
    )
    comparisons = compare(benchmark, ours, read_rows(baselines))
    lines = [f"{op} on {meta['device']}, driver {meta['driver']}, jax {meta['jax']}"]
    lines.append(f"{len(ours)} rows, {stale} of them from other sources than these")
    lines += ["", *(line(c.label, c.row, c) for c in comparisons)]
    judged = {id(c.row) for c in comparisons}
    lines += ["", *(line(benchmark.label(row), row) for row in ours if id(row) not in judged)]
    lines += ["", *summary(benchmark, comparisons)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--op", help="one op; otherwise every op that has a benchmark")
    parser.add_argument("--rows", help="cases, as patterns: 'hy3/*,longcat/64'")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of <op>.jsonl")
    parser.add_argument("--baselines", type=Path, default=BASELINES, help="the peers' rows")
    parser.add_argument(
        "--plots",
        type=Path,
        nargs="?",
        const=RESULTS.parents[2] / "docs" / "assets",
        help="draw a plot per op into a folder (docs/assets); needs the extra 'bench'",
    )
    options = parser.parse_args(arguments)
    for op in [options.op] if options.op else rows_module.MODULES:
        results = options.results / f"{op}.jsonl"
        print(report(op, results, options.baselines, options.rows))
        if options.plots:
            from benchmarks.plots import plot

            path = plot(
                load(op), read_results(results)[1], read_rows(options.baselines), options.plots
            )
            print(f"plot: {path}")


if __name__ == "__main__":
    main()
