"""How long new weights take to reach the generators: `magistral bench broadcast`.

Starts trainer and generator ranks on this machine, or is one of them under torchrun or srun, and
sends updates with the trainer's own code. Receivers are in memory: this measures the wire and the
protocol, not an engine. Everything is compared with a bare broadcast of the same bytes, in the same
buckets, over the same ranks, in the same run.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.broadcast.calibrate import Comparison, cases, compare, spread
from benchmarks.broadcast.launch import RankFailed, adopt_launcher, preload, run_local
from benchmarks.broadcast.preflight import Link, NoMeeting, PairResult, probe_links, summary
from benchmarks.broadcast.ranks import run_rank
from benchmarks.broadcast.report import Report, show, summarise
from benchmarks.broadcast.results import Options, Result
from benchmarks.broadcast.sweep import Skipped, settings_of, sweep, sweep_as_rank
from megatron_magistral.output_file import check_output_file
from megatron_magistral.rollout.engine import EngineControl, EngineError
from megatron_magistral.trainer.layout import LayoutError
from megatron_magistral.weights.architecture import ArchitectureError
from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout, check_layouts
from megatron_magistral.weights.presets import find_model
from megatron_magistral.weights.settings import PlanKind

MIB = 1 << 20
BAD_INPUT, FAILED = 2, 1
RUN_TIMEOUT_S = 600.0
ENGINE_TIMEOUT_S = 5.0
PLOT_SUFFIXES = (".svg", ".png")


class WireDtype(StrEnum):
    """What engines compute in."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


Model = Annotated[str, typer.Option(help="A preset, a config.json, or about how many MiB.")]
Plan = Annotated[PlanKind, typer.Option(help="Who gets what, as rl.weight_plan.")]
ExpectedGbS = Annotated[
    float | None,
    typer.Option(min=0, help="With --preflight: GB/s below which a link between hosts is slow."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="With --sweep: draw it; .svg or .png.")
]
LimitS = Annotated[
    float, typer.Option(min=1, help="Seconds after which no further setting is begun.")
]
Sweeps = Annotated[
    bool, typer.Option("--sweep", help="Try bucket sizes and numbers of generators.")
]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(width=int(os.environ.get("COLUMNS", "130")))


@app.command()
def main(
    model: Model = "64",
    tp: Annotated[int, typer.Option(min=1, help="Trainer's tensor parallel size.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Trainer's pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Trainer's data parallel size.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Generators.")] = 1,
    generator_tp: Annotated[int, typer.Option(min=1, help="Ranks of a generator.")] = 1,
    dtype: Annotated[WireDtype, typer.Option(help="Type of what is sent.")] = WireDtype.BFLOAT16,
    bucket_mib: Annotated[int, typer.Option(min=1, help="Largest bucket, MiB.")] = 16,
    plan: Plan = PlanKind.GATHER,
    rounds: Annotated[int, typer.Option(min=1, help="Updates that are measured.")] = 10,
    step_s: Annotated[float, typer.Option(min=0, help="Seconds between updates in a run.")] = 60.0,
    engine: Annotated[list[str] | None, typer.Option(help="URL of a real SGLang; repeat.")] = None,
    checksums: Annotated[bool, typer.Option(help="Read back and compare, as runs do.")] = True,
    preflight: Annotated[bool, typer.Option(help="Only look at the links, pair by pair.")] = False,
    expected_gb_s: ExpectedGbS = None,
    sweeps: Sweeps = False,
    limit_s: LimitS = 600.0,
    calibrate: Annotated[bool, typer.Option(help="Check the cost model on many layouts.")] = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Measure weight updates. Exit status 1 if a target is missed or a link is broken."""
    try:
        options = Options(
            arch=find_model(model),
            trainer=TrainerLayout(tp=tp, pp=pp, dp=dp),
            generator=GeneratorLayout(replicas=len(engine or ()) or replicas, tp=generator_tp),
            bucket_bytes=bucket_mib * MIB,
            dtype=dtype.value,
            rounds=rounds,
            checksums=checksums,
            engine_urls=tuple(engine or ()),
            plan=plan,
        )
        check_layouts(options.arch, options.trainer, options.generator)
        _check_kind(preflight, sweeps, calibrate, expected_gb_s, plot_file)
        for option, path in (("--json", json_file), ("--plot", plot_file)):
            check_output_file(option, path)
    except (ArchitectureError, LayoutError, ValueError) as error:
        _refuse(str(error))
    for url in options.engine_urls:
        asyncio.run(_check_engine(url))
    is_launched = adopt_launcher(os.environ)
    preload(run_rank.__module__)
    try:
        if preflight:
            _preflight(options.world_size, is_launched, expected_gb_s, json_file)
        elif calibrate:
            _calibrate(options, is_launched, limit_s, json_file)
        elif sweeps:
            _sweep(options, is_launched, step_s, limit_s, json_file, plot_file)
        else:
            _measure_one(options, is_launched, step_s, json_file)
    except (RankFailed, NoMeeting) as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(FAILED) from error


def _check_kind(
    preflight: bool,
    sweeps: bool,
    calibrate: bool,
    expected_gb_s: float | None,
    plot_file: Path | None,
) -> None:
    """Raises ValueError for options of which one would be without effect."""
    kinds = {"--preflight": preflight, "--sweep": sweeps, "--calibrate": calibrate}
    chosen = [option for option, is_chosen in kinds.items() if is_chosen]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)}: must be one of them")
    if expected_gb_s is not None and not preflight:
        raise ValueError("--expected-gb-s: needs --preflight")
    if plot_file is not None and not sweeps:
        raise ValueError("--plot: needs --sweep")
    if plot_file is not None and plot_file.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"--plot {plot_file}: must end in {' or '.join(PLOT_SUFFIXES)}")


async def _check_engine(url: str) -> None:
    """One clear line before ranks are started."""
    try:
        async with EngineControl(url) as engine:
            await engine.give_sign_of_life(ENGINE_TIMEOUT_S)
            await engine.check_server()
    except EngineError as error:
        _refuse(str(error))


def _run(options: Options, is_launched: bool) -> Result | None:
    """The result, or None on a rank that only takes part."""
    if is_launched:
        return run_rank(options)
    return _run_here(options)


def _run_here(options: Options) -> Result:
    """The result of ranks that are started for it on this machine. Raises RankFailed."""
    result = run_local(run_rank, options.world_size, options, timeout_s=RUN_TIMEOUT_S)[0]
    assert isinstance(result, Result)
    return result


def _measure_one(
    options: Options, is_launched: bool, step_s: float, json_file: Path | None
) -> None:
    result = _run(options, is_launched)
    if result is None:
        return
    report = summarise(options, result, step_s)
    show(report, console)
    _write(json_file, report.as_json())
    if report.missed():
        raise typer.Exit(FAILED)


def _preflight(
    num_ranks: int, is_launched: bool, expected_gb_s: float | None, json_file: Path | None
) -> None:
    results: list[PairResult]
    if is_launched:
        results = probe_links(expected_gb_s)
        if int(os.environ["RANK"]):
            return
    else:
        results = run_local(probe_links, num_ranks, expected_gb_s, timeout_s=RUN_TIMEOUT_S)[0]
    for line in summary(results):
        console.print(line, highlight=False)
    bad = [result for result in results if result.link is not Link.GOOD]
    for result in bad:
        console.print(str(result), style="red", highlight=False, markup=False, soft_wrap=True)
    _write(json_file, [asdict(result) for result in results])
    if bad:
        raise typer.Exit(FAILED)


def _sweep(
    options: Options,
    is_launched: bool,
    step_s: float,
    limit_s: float,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Files are written after every setting: what is measured is not lost."""
    found: list[tuple[Report, Comparison | None]] = []
    skipped: list[Skipped] = []
    for each in _settings(options, is_launched, limit_s):
        if isinstance(each, Skipped):
            skipped.append(each)
            continue
        report, comparison = summarise(*each, step_s), compare(*each)
        show(report, console)
        found.append((report, comparison))
        _write(json_file, [_row(*each) for each in found])
        if plot_file is not None:
            # Only a sweep draws, so only a sweep needs matplotlib.
            from benchmarks.broadcast.plot import plot_sweep

            plot_sweep([report for report, _ in found], plot_file)
    _show_comparisons([comparison for _, comparison in found if comparison is not None])
    _show_skipped(skipped)


def _show_skipped(skipped: Sequence[Skipped]) -> None:
    for each in skipped:
        console.print(str(each), style="red", markup=False, soft_wrap=True)
    if skipped:
        raise typer.Exit(FAILED)


def _settings(
    options: Options, is_launched: bool, limit_s: float
) -> Iterator[tuple[Options, Result] | Skipped]:
    if is_launched:
        return sweep_as_rank(settings_of(options), run_rank)
    return sweep(settings_of(options), _run_here, limit_s)


def _row(report: Report, comparison: Comparison | None) -> dict[str, Any]:
    return report.as_json() | {"prediction": comparison and asdict(comparison)}


def _calibrate(options: Options, is_launched: bool, limit_s: float, json_file: Path | None) -> None:
    """What the bare operations of a run say of its updates, beside the truth, in many layouts."""
    if is_launched or options.engine_urls:
        _refuse("--calibrate changes the number of ranks: it starts them itself, without engines")
    found: list[Comparison] = []
    skipped: list[Skipped] = []
    for each in sweep(cases(options), _run_here, limit_s):
        if isinstance(each, Skipped):
            skipped.append(each)
            continue
        comparison = compare(*each)
        assert comparison is not None, "ranks of our own measure what is bare"
        found.append(comparison)
        _write(json_file, [asdict(each) | {"ratio": each.ratio} for each in found])
    _show_comparisons(found)
    _show_skipped(skipped)


def _show_comparisons(comparisons: Sequence[Comparison]) -> None:
    """The cost model's word and the truth, case by case."""
    if not comparisons:
        return
    table = Table(title="Whole updates, ms: predicted from bare operations, and measured (fastest)")
    for column in (
        "trainer",
        "generators",
        "model",
        "bucket",
        "bare",
        "predicted",
        "measured",
        "ratio",
    ):
        table.add_column(column, justify="left" if column in ("trainer", "generators") else "right")
    for c in comparisons:
        seconds = (c.bare_broadcast_s, c.predicted_s, c.measured_s)
        table.add_row(
            f"TP {c.trainer.tp} PP {c.trainer.pp}",
            f"{c.generator.replicas} of TP {c.generator.tp}",
            f"{c.model_mib:.0f}",
            f"{c.bucket_mib:g}",
            *(f"{1000 * value:.0f}" for value in seconds),
            f"{c.ratio:.2f}",
        )
    console.print(table)
    middle, largest = spread([c.error for c in comparisons])
    console.print(f"cost model: absolute error, median {middle:.0%}, largest {largest:.0%}")


def _write(path: Path | None, document: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n")


def _refuse(message: str) -> NoReturn:
    Console(stderr=True).print(message, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(BAD_INPUT)


if __name__ == "__main__":
    app()
