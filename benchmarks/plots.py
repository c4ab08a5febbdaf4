"""Plots of results beside the recorded peers; needs matplotlib (the extra ``bench``)."""

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import CASE_KEYS, Benchmark, Row


def plot(
    benchmark: Benchmark, ours: Sequence[Row], baselines: Sequence[Row], folder: Path
) -> Path:
    """Draw time over case, a panel for each value of the first case key; gives the svg's path."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("svg")
    # The same rows give the same file.
    matplotlib.rcParams["svg.hashsalt"] = benchmark.op
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    first, last = CASE_KEYS[benchmark.op][0], CASE_KEYS[benchmark.op][-1]
    several = first != last
    panels = list(dict.fromkeys(c[first] if several else None for c in benchmark.cases))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 4), squeeze=False, layout="constrained"
    )
    series_of = {panel: _series(benchmark, ours, baselines, panel) for panel in panels}
    # One colour for a name in every panel: not all panels have all names.
    names = list(dict.fromkeys(name for series in series_of.values() for name in series))
    colours = {name: f"C{i % 10}" for i, name in enumerate(n for n in names if n != "floor")}
    for axis, panel in zip(axes[0], panels, strict=True):
        cases = [c for c in benchmark.cases if panel is None or c[first] == panel]
        ticks = [case[last] for case in cases]
        for name, times in series_of[panel].items():
            places = [i for i, tick in enumerate(ticks) if tick in times]
            axis.plot(
                places,
                [times[ticks[i]] for i in places],
                label=name,
                **_style(name, benchmark, colours),
            )
        axis.set_yscale("log")
        axis.set_xticks(range(len(ticks)), [str(tick) for tick in ticks], rotation=60)
        axis.set_xlabel(last)
        axis.set_title(panel or benchmark.op)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("microseconds a call")
    handles = {}
    for axis in axes[0]:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{benchmark.op}.svg"
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _series(
    benchmark: Benchmark, ours: Sequence[Row], baselines: Sequence[Row], panel: str | None
) -> dict[str, dict[object, float]]:
    """Name -> {value of the last case key: time}."""
    first, last = CASE_KEYS[benchmark.op][0], CASE_KEYS[benchmark.op][-1]
    series: dict[str, dict[object, float]] = {}
    # What does the same as the recorded peers, and the rest of what that is judged by.
    shown = benchmark.recorded.union(*(benchmark.rivals[name] for name in benchmark.recorded))
    for row in [*ours, *baselines]:
        if row["op"] != benchmark.op or (panel is not None and row[first] != panel):
            continue
        if "impl" in row and row["impl"] not in shown:
            continue
        name = row["peer"] if "peer" in row else benchmark.label(row)
        series.setdefault(name, {})[row[last]] = row["us"]
        if "impl" in row and row["impl"] in benchmark.recorded:
            floor = series.setdefault("floor", {})
            floor[row[last]] = min(row["floor_us"], floor.get(row[last], math.inf))
    return series


def _style(name: str, benchmark: Benchmark, colours: dict[str, str]) -> dict[str, object]:
    if name == "floor":
        return {"color": "black", "linestyle": ":", "linewidth": 1}
    ours = name.partition(":")[0] in benchmark.recorded
    return {
        "color": colours[name],
        "marker": "o",
        "markersize": 3,
        "linewidth": 2.2 if ours else 1,
        "alpha": 1.0 if ours else 0.7,
    }
