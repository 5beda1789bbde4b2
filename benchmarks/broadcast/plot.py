"""A sweep as a picture: bandwidth and overhead over the size of a bucket, by number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.broadcast.report import WHOLE_TARGET, Report

SIZE_INCHES, DPI = (10.0, 4.4), 160
GREY = "0.35"


def plot_sweep(reports: Sequence[Report], path: Path) -> None:
    """One colour for each number of generator ranks; the format is that of the file's ending."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    speed, ratio = figure.subplots(1, 2)
    worlds = sorted({_num_ranks(report) for report in reports})
    colours = colormaps["viridis"].resampled(max(2, len(worlds) + 1))
    for number, world in enumerate(worlds):
        chosen = sorted(
            (report for report in reports if _num_ranks(report) == world),
            key=lambda report: report.setting["bucket_mib"],
        )
        _lines(speed, ratio, chosen, colours(number))
    for axes, title in (
        (speed, "Bus bandwidth, GB/s (median)"),
        (ratio, "Whole update / bare broadcast (median)"),
    ):
        _dress(axes, title, sorted({report.setting["bucket_mib"] for report in reports}))
    ratio.axhline(WHOLE_TARGET, color=GREY, linewidth=1, linestyle=":")
    ratio.annotate(
        f"goal {WHOLE_TARGET:g}",
        (0.995, WHOLE_TARGET),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=GREY,
        fontsize=8,
    )
    _legend(figure, worlds, [colours(number) for number in range(len(worlds))])
    figure.suptitle(_title(reports[0]), fontsize=11)
    figure.savefig(path, dpi=DPI)


def _lines(speed: Axes, ratio: Axes, reports: Sequence[Report], colour: object) -> None:
    sizes = [report.setting["bucket_mib"] for report in reports]
    for name, style in (("whole update", "-"), ("bare broadcast", "--")):
        if all(name in report.bus_gb_s for report in reports):
            values = [report.bus_gb_s[name] for report in reports]
            marker = "o" if style == "-" else None
            speed.plot(sizes, values, style, marker=marker, markersize=4, color=colour)
    if all(report.whole_per_bare is not None for report in reports):
        values = [report.whole_per_bare or 0.0 for report in reports]
        ratio.plot(sizes, values, "-", marker="o", markersize=4, color=colour)


def _dress(axes: Axes, title: str, sizes: Sequence[float]) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("bucket, MiB")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, worlds: Sequence[int], colours: Sequence[object]) -> None:
    def line(label: str, **look: object) -> Line2D:
        return Line2D([], [], label=label, **look)  # type: ignore[arg-type]

    handles = [
        *(
            line(f"{world} generator rank{'s' * (world > 1)}", color=colour, marker="o")
            for world, colour in zip(worlds, colours, strict=True)
        ),
        line("whole update", color=GREY, linestyle="-"),
        line("bare broadcast", color=GREY, linestyle="--"),
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 6),
        frameon=False,
        fontsize=9,
    )


def _title(report: Report) -> str:
    setting = report.setting
    trainer = ", ".join(f"{key.upper()} {value}" for key, value in setting["trainer"].items())
    return (
        f"Weight updates of {setting['model_mib']:.0f} MiB over {setting['backend']}; "
        f"trainer {trainer}; generators of TP {setting['generator']['tp']}"
    )


def _num_ranks(report: Report) -> int:
    generator = report.setting["generator"]
    return int(generator["replicas"] * generator["tp"])
