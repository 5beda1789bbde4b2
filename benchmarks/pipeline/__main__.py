"""What asynchrony gains: `magistral bench pipeline`.

Three runs of the whole system with the same work a step: synchronous, one-step-off, asynchronous.
Each has the product's controller, queue and engine pool, and a real Megatron trainer that sends its
weights into a real SGLang server in the middle of generation. Lengths are drawn from a heavy-tailed
distribution (see rollout.py); that and the grader, which answers at once, are all that is not real.

Before and after each run the idle server is measured at several concurrencies. From that, from the
trainer's speed in the run and from the same lengths `magistral plan`'s model predicts the steps an
hour, and the error is printed.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.pipeline.calibrate import Calibration, calibrate, mean_of
from benchmarks.pipeline.results import (
    Measured,
    MeasuredSpeeds,
    measure,
    predict,
    trainer_speed,
)
from benchmarks.pipeline.runs import Options, prepare, run_mode, serving
from megatron_magistral.analysis.lengths import FORMS, LengthsError, parse_lengths
from megatron_magistral.analysis.outlook import Outlook
from megatron_magistral.analysis.pipeline_model import Mode
from megatron_magistral.analysis.speeds import mean_context
from megatron_magistral.run_folder import RunFolder

MIN_GAIN = 2.5
MAX_IDLE = 0.05
# A trainer that waits less than this is what everything waits for.
TRAINER_BOUND = 0.05
MAX_ERROR = 0.15
BAD_INPUT, FAILED = 2, 1

console = Console()


def main(
    n_batch: Annotated[int, typer.Option(min=2, help="Completions of a step.")] = 64,
    n_async: Annotated[
        int, typer.Option(min=2, help="Sequences in flight, asynchronous run.")
    ] = 128,
    queue_size: Annotated[
        int, typer.Option(min=1, help="Sequences that may wait, same run.")
    ] = 128,
    group_size: Annotated[int, typer.Option(min=2, help="Completions of a prompt.")] = 8,
    l_max: Annotated[int, typer.Option(min=64, help="Longest completion, tokens.")] = 1024,
    lengths: Annotated[
        str, typer.Option(help=f"Lengths of completions in tokens: {FORMS}.")
    ] = "pareto:126,1.05",
    num_steps: Annotated[int, typer.Option(min=4, help="Steps of the other two runs.")] = 14,
    num_async_steps: Annotated[
        int, typer.Option(min=4, help="Steps of the asynchronous run.")
    ] = 34,
    num_warm_up: Annotated[int, typer.Option(min=1, help="First steps of each, not measured.")] = 4,
    timeout_s: Annotated[float, typer.Option(help="Longest time of one run, seconds.")] = 600.0,
    folder: Annotated[Path | None, typer.Option(help="Keep the runs here.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the numbers as JSON.")] = None,
) -> None:
    """Measure the three modes; exit with 1 if a target is missed."""
    options = Options(
        n_batch=n_batch,
        n_async=n_async,
        queue_size=queue_size,
        group_size=group_size,
        l_max=l_max,
        lengths=lengths,
        num_steps=num_steps,
        num_async_steps=num_async_steps,
        num_warm_up=num_warm_up,
        timeout_s=timeout_s,
    )
    try:
        draws = parse_lengths(lengths, l_max).draws()
    except LengthsError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(BAD_INPUT) from error
    if folder is not None:
        folder.mkdir(parents=True)
    place = tempfile.TemporaryDirectory() if folder is None else nullcontext(str(folder.resolve()))
    with place as root:
        results = run_all(options, mean_context(draws, 0.0), Path(root))
    _show(options, results)
    missed = _missed(results)
    if out is not None:
        document: dict[str, Any] = {"options": asdict(options), "missed": missed}
        document["results"] = [asdict(result) for result in results]
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for line in missed:
        console.print(f"missed: {line}", style="bold red", markup=False)
    if missed:
        raise typer.Exit(FAILED)


@dataclass(frozen=True)
class Result:
    """Of one mode. `speeds` are what the prediction was made from: the server's were measured
    before and after the run, the trainer's in it."""

    measured: Measured
    speeds: MeasuredSpeeds
    predicted: Outlook

    @property
    def error(self) -> float:
        return self.predicted.steps_per_h / self.measured.steps_per_h - 1


def run_all(options: Options, context: float, root: Path) -> list[Result]:
    """Slowest mode first. `context` is how many tokens a running completion has sampled on
    average."""

    def say(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {text}")

    prepared = prepare(options, root)
    runs: dict[Mode, RunFolder] = {}
    calibrations: list[Calibration] = []
    with serving(options, prepared) as url:
        say("starting the server")

        def look() -> None:
            calibrations.append(calibrate(url, prepared.limits, prepared.prompt_tokens, context))

        look()
        for mode in (Mode.SYNCHRONOUS, Mode.ONE_STEP_OFF, Mode.ASYNCHRONOUS):
            say(f"{mode}: {options.steps_of(mode)} steps")
            runs[mode] = run_mode(options, mode, prepared, root / mode.name.lower(), url)
            look()
    results = []
    for (mode, run), around in zip(runs.items(), pairwise(calibrations), strict=True):
        curve, start_s = mean_of(around)
        trainer = trainer_speed(run, options.num_warm_up)
        speeds = MeasuredSpeeds(curve, start_s, prepared.prompt_tokens, trainer)
        results.append(Result(measure(run, mode, options), speeds, predict(options, mode, speeds)))
    return results


def _gain(results: list[Result]) -> float:
    rates = {result.measured.mode: result.measured.steps_per_h for result in results}
    return rates[Mode.ASYNCHRONOUS] / rates[Mode.SYNCHRONOUS]


def _missed(results: list[Result]) -> list[str]:
    missed = []
    asynchronous = results[-1].measured
    if (gain := _gain(results)) < MIN_GAIN:
        missed.append(f"asynchronous / synchronous steps: {gain:.2f}, at least {MIN_GAIN}")
    if asynchronous.trainer_idle > TRAINER_BOUND and asynchronous.generator_idle > MAX_IDLE:
        share = f"{asynchronous.generator_idle:.1%}"
        missed.append(f"generator idle, asynchronous: {share}, at most {MAX_IDLE:.0%}")
    for result in results:
        mode = result.measured.mode
        for name in ("aborted", "lost", "duplicated"):
            if count := getattr(result.measured, f"num_{name}"):
                missed.append(f"{mode}: {count} {name}, none may be")
        if abs(result.error) > MAX_ERROR:
            missed.append(f"{mode}: predicted {result.error:+.0%}, within {MAX_ERROR:.0%}")
    return missed


def _show(options: Options, results: list[Result]) -> None:
    measured = [result.measured for result in results]
    predicted = [result.predicted for result in results]
    title = f"{options.n_batch} completions a step, lengths {options.lengths} up to {options.l_max}"
    table = Table("", title=title)
    for item in measured:
        table.add_column(item.mode.value, justify="right")

    def row(name: str, values: list[str]) -> None:
        table.add_row(name, *values)

    row("steps/h", [f"{m.steps_per_h:.0f}" for m in measured])
    row("  x synchronous", [f"{m.steps_per_h / measured[0].steps_per_h:.2f}" for m in measured])
    row("  predicted", [f"{p.steps_per_h:.0f}" for p in predicted])
    row("  error", [f"{result.error:+.1%}" for result in results])
    row("trained tokens/s", [f"{m.trained_tokens_per_s:.0f}" for m in measured])
    row("generator idle", [f"{m.generator_idle:.1%}" for m in measured])
    row("  predicted", [f"{p.generator_idle:.1%}" for p in predicted])
    row("generator paused", [f"{m.generator_paused:.1%}" for m in measured])
    row("trainer idle", [f"{m.trainer_idle:.1%}" for m in measured])
    row("  predicted", [f"{p.trainer_idle:.1%}" for p in predicted])
    row("token age, mean", [f"{m.staleness_mean:.2f}" for m in measured])
    row("  predicted", [f"{p.staleness_mean:.2f}" for p in predicted])
    row("token age, max", [f"{m.staleness_max:.0f}" for m in measured])
    for name in ("aborted", "lost", "duplicated"):
        row(name, [str(getattr(m, f"num_{name}")) for m in measured])
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
