"""A sweep as a picture: bandwidth and overhead over the size of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.broadcast.report import WHOLE_TARGET, Report


def plot_sweep(reports: Sequence[Report], path: Path) -> None:
    """One line for each number of generators; the format is that of the file's ending."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, ratio = figure.subplots(1, 2)
    for number in sorted({r.setting["generator"]["replicas"] for r in reports}):
        chosen = [r for r in reports if r.setting["generator"]["replicas"] == number]
        sizes = [r.setting["bucket_mib"] for r in chosen]
        label = f"{number} generator{'s' * (number > 1)}"
        for name, style in (("whole update", "o-"), ("bare broadcast", "x--")):
            if all(name in r.bus_gb_s for r in chosen):
                values = [r.bus_gb_s[name] for r in chosen]
                speed.plot(sizes, values, style, label=f"{label}, {name}")
        if all(r.whole_per_bare is not None for r in chosen):
            ratio.plot(sizes, [r.whole_per_bare for r in chosen], "o-", label=label)
    ratio.axhline(WHOLE_TARGET, color="grey", linewidth=1)
    for axes, title in ((speed, "bus bandwidth, GB/s"), (ratio, "whole update / bare broadcast")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bucket, MiB")
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.legend()
    figure.savefig(path)
