"""How long new weights take to reach the generators: `magistral bench broadcast`.

Starts trainer and generator ranks on this machine, or is one of them under torchrun or srun, and
sends updates with the trainer's own code. Receivers are in memory: this measures the wire and the
protocol, not an engine. Everything is compared with a bare broadcast of the same bytes, in the same
buckets, over the same ranks, in the same run.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from benchmarks.broadcast.calibrate import (
    calibrated,
    links_of,
    predicted,
    relative_error,
    spread,
    variants,
)
from benchmarks.broadcast.launch import RankFailed, adopt_launcher, preload, run_local
from benchmarks.broadcast.preflight import Link, probe_links
from benchmarks.broadcast.ranks import run_rank
from benchmarks.broadcast.report import Report, show, summarise
from benchmarks.broadcast.results import Options, Result
from megatron_magistral.trainer.layout import LayoutError
from megatron_magistral.weights.architecture import ArchitectureError
from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout, check_layouts
from megatron_magistral.weights.presets import find_model

MIB = 1 << 20
BAD_INPUT, FAILED = 2, 1
RUN_TIMEOUT_S = 600.0


class WireDtype(StrEnum):
    """What engines compute in."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(width=int(os.environ.get("COLUMNS", "130")))


@app.command()
def main(
    model: Annotated[str, typer.Option(help="A preset, a config.json, or a size in MiB.")] = "64",
    tp: Annotated[int, typer.Option(min=1, help="Trainer's tensor parallel size.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Trainer's pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Trainer's data parallel size.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Generators.")] = 1,
    generator_tp: Annotated[int, typer.Option(min=1, help="Ranks of a generator.")] = 1,
    dtype: Annotated[WireDtype, typer.Option(help="Of what is sent.")] = WireDtype.BFLOAT16,
    bucket_mib: Annotated[int, typer.Option(min=1, help="Largest bucket.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Updates that count.")] = 10,
    step_s: Annotated[float, typer.Option(min=0, help="Seconds between updates in a run.")] = 60.0,
    engine: Annotated[list[str] | None, typer.Option(help="URL of a real SGLang; repeat.")] = None,
    checksums: Annotated[bool, typer.Option(help="Read back and compare, as runs do.")] = True,
    preflight: Annotated[bool, typer.Option(help="Only look at the links, pair by pair.")] = False,
    sweep: Annotated[bool, typer.Option(help="Bucket sizes and numbers of generators.")] = False,
    calibrate: Annotated[bool, typer.Option(help="Check the cost model: other settings.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Of a sweep; svg, png.")] = None,
) -> None:
    """Measure weight updates. Exit status 1 if a target is missed or a link is broken."""
    try:
        options = Options(
            arch=find_model(model),
            trainer=TrainerLayout(tp=tp, pp=pp, dp=dp),
            generator=GeneratorLayout(replicas=replicas, tp=generator_tp),
            bucket_bytes=bucket_mib * MIB,
            dtype=dtype.value,
            rounds=rounds,
            checksums=checksums,
            engine_urls=tuple(engine or ()),
        )
        check_layouts(options.arch, options.trainer, options.generator)
    except (ArchitectureError, LayoutError) as error:
        _refuse(str(error))
    is_launched = adopt_launcher(os.environ)
    preload(run_rank.__module__)
    try:
        if preflight:
            _preflight(options, is_launched)
        elif calibrate:
            _calibrate(options, is_launched, json_file)
        elif sweep:
            _sweep(options, is_launched, step_s, json_file, plot_file)
        else:
            _measure_one(options, is_launched, step_s, json_file)
    except RankFailed as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(FAILED) from error


def _run(options: Options, is_launched: bool) -> Result | None:
    """The result, or None on a rank that only takes part."""
    if is_launched:
        return run_rank(options)
    return run_local(run_rank, options.world_size, options, timeout_s=RUN_TIMEOUT_S)[0]


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


def _preflight(options: Options, is_launched: bool) -> None:
    if is_launched:
        results = probe_links(options)
        if int(os.environ["RANK"]):
            return
    else:
        results = run_local(probe_links, options.world_size, options, timeout_s=RUN_TIMEOUT_S)[0]
    for result in results:
        style = "" if result.link is Link.GOOD else "red"
        console.print(str(result), style=style, highlight=False)
    if any(result.link is not Link.GOOD for result in results):
        raise typer.Exit(FAILED)


def _sweep(
    options: Options,
    is_launched: bool,
    step_s: float,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Bucket sizes up to the one given and, where ranks are ours to start, 1 to `replicas`."""
    bucket_bytes = [options.bucket_bytes // share for share in (8, 4, 2, 1)]
    most = options.generator.replicas
    replicas = [most] if is_launched else list(range(1, most + 1))
    reports: list[Report] = []
    errors: list[float] = []
    rows: list[dict[str, Any]] = []
    for number, size in itertools.product(replicas, bucket_bytes):
        setting = replace(
            options, generator=replace(options.generator, replicas=number), bucket_bytes=size
        )
        result = _run(setting, is_launched)
        if result is None:
            continue
        report = summarise(setting, result, step_s)
        show(report, console)
        errors.append(relative_error(predicted(setting, links_of(result)), result))
        console.print(f"cost model: {errors[-1]:+.0%} of the measured update\n", highlight=False)
        reports.append(report)
        rows.append(report.as_json() | {"prediction_error": errors[-1]})
    if not reports:
        return
    middle, largest = spread(errors)
    console.print(f"cost model, absolute error: median {middle:.0%}, largest {largest:.0%}")
    _write(json_file, rows)
    if plot_file is not None:
        # Only a sweep draws, so only a sweep needs matplotlib.
        from benchmarks.broadcast.plot import plot_sweep

        plot_sweep(reports, plot_file)


def _calibrate(options: Options, is_launched: bool, json_file: Path | None) -> None:
    """What one run says of the machine, and what follows from it for others, beside the truth."""
    if is_launched or options.engine_urls:
        _refuse("--calibrate changes the number of ranks: it starts them itself, without engines")
    base = _run(options, is_launched)
    assert base is not None
    links = calibrated(options, base)
    rows: list[dict[str, Any]] = []
    for name, setting in [("the setting given", options), *variants(options)]:
        result = base if setting is options else _run(setting, is_launched)
        assert result is not None
        guess = predicted(setting, links)
        error = relative_error(guess, result)
        rows.append({"setting": name, "predicted_s": guess.total_s, "error": error})
        measured_s = guess.total_s / (1 + error)
        console.print(
            f"{name:<26} measured {measured_s:7.3f} s  predicted {guess.total_s:7.3f} s  "
            f"error {error:+.0%}",
            highlight=False,
        )
    middle, largest = spread([row["error"] for row in rows[1:]])
    console.print(f"absolute error of the others: median {middle:.0%}, largest {largest:.0%}")
    _write(json_file, {"links": asdict(links), "rows": rows})


def _write(path: Path | None, document: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n")


def _refuse(message: str) -> NoReturn:
    Console(stderr=True).print(message, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(BAD_INPUT)


if __name__ == "__main__":
    app()
