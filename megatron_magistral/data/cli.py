"""`magistral data`: data from what runs have left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from megatron_magistral.data.pass_rates import read_pass_rates
from megatron_magistral.data.schema import BadRow, each_row, read_rows, write_rows
from megatron_magistral.data.traces import (
    Instruction,
    Sample,
    Selection,
    SelectionSettings,
    mix,
    select_traces,
)
from megatron_magistral.jsonl import lines_from_end
from megatron_magistral.run_folder import RunFolder

BAD_INPUT = 2
EARLY_SHARE = 0.1

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Row = TypeVar("Row", bound=msgspec.Struct)
_DEFAULTS = SelectionSettings()


@app.callback()
def data() -> None:
    """Make data from what runs have left."""


@app.command()
def traces(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of an RL run.")],
    out: Annotated[Path, typer.Option(help="JSONL to write; `data.traces` of an SFT config.")],
    from_step: Annotated[
        int | None,
        typer.Option(
            help="First step whose completions are used; without it, a tenth of the steps in."
        ),
    ] = None,
    min_tokens: Annotated[
        int, typer.Option(help="Tokens of the shortest completion.")
    ] = _DEFAULTS.min_tokens,
    max_per_problem: Annotated[
        int, typer.Option(help="Different traces of a problem.")
    ] = _DEFAULTS.max_per_problem,
    hard_below: Annotated[
        float, typer.Option(help="Problems of a lower pass rate are hard.")
    ] = _DEFAULTS.hard_below,
    copies_of_hard: Annotated[
        int, typer.Option(help="Times that a trace of a hard problem is given.")
    ] = _DEFAULTS.copies_of_hard,
    general: Annotated[
        Path | None, typer.Option(help="JSONL of general instructions: prompt, response.")
    ] = None,
    general_share: Annotated[
        float, typer.Option(help="Share of general instructions in what is written.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Of what is chosen and of the order.")] = 0,
) -> None:
    """Traces for SFT from the correct completions that an RL run kept.

    A run keeps `rl.keep_samples` completions of each step: for many traces set it to rl.n_batch.
    """
    folder = RunFolder(run)
    instructions = _read(general, Instruction, _instruction_fault) if general is not None else ()
    if from_step is None:
        from_step = round(EARLY_SHARE * (1 + _last_step(folder.samples)))
    try:
        settings = SelectionSettings(
            from_step, min_tokens, max_per_problem, hard_below, copies_of_hard, seed
        )
        selection = select_traces(_each_sample(folder.samples), _pass_rates(folder), settings)
        share = general_share if general is not None else 0.0
        rows = mix(selection.traces, instructions, share, seed)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        _refuse(f"--{name.replace('_', '-')} {rest}")
    if not rows:
        _print(selection, 0, Console(stderr=True))
        _refuse(f"{folder.samples}: none of its completions is left; nothing was written")
    try:
        write_rows(out, rows)
    except OSError as error:
        _refuse(f"--out {out}: cannot be written: {error.strerror}")
    _print(selection, len(rows) - len(selection.traces), Console())


def _last_step(path: Path) -> int:
    """Samples are in the order of their steps."""
    decode = msgspec.json.Decoder(Sample).decode
    try:
        for _, line in lines_from_end(path):
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                return decode(line).step
    except OSError as error:
        _refuse(f"{path}: cannot be read: {error.strerror}")
    num_bad = sum(1 for _ in _each_sample(path))  # says what is wrong with them
    assert num_bad == 0, "a row that can be read has a step"
    _refuse(f"{path}: holds no usable row")


def _each_sample(path: Path) -> Iterator[Sample]:
    try:
        for row in each_row(path, Sample, _sample_fault):
            if isinstance(row, BadRow):
                _report([row])
            else:
                yield row
    except OSError as error:
        _refuse(f"{path}: cannot be read: {error.strerror}")


def _pass_rates(folder: RunFolder) -> dict[str, float]:
    """Of every completion of the run, where it counted them; else the samples have to do."""
    try:
        return read_pass_rates(folder.pass_rates)
    except FileNotFoundError:
        return {}


def _read(path: Path, row_type: type[Row], fault: Callable[[Row], str | None]) -> tuple[Row, ...]:
    try:
        rows = read_rows(path, row_type, fault)
    except OSError as error:
        _refuse(f"{path}: cannot be read: {error.strerror}")
    _report(rows.bad)
    if not rows.rows:
        _refuse(f"{path}: holds no usable row ({len(rows.bad)} were set aside)")
    return rows.rows


def _report(bad: Sequence[BadRow]) -> None:
    for row in bad:
        typer.echo(f"set aside {row}", err=True)


def _sample_fault(sample: Sample) -> str | None:
    if not sample.response.strip():
        return "response is empty"
    return None if sample.statement.strip() else "statement is empty"


def _instruction_fault(instruction: Instruction) -> str | None:
    if not instruction.prompt.strip():
        return "prompt is empty"
    return None if instruction.response.strip() else "response is empty"


def _print(selection: Selection, num_general: int, console: Console) -> None:
    table = Table("completions", "rows")
    for what, count in selection.counts.items():
        table.add_row(what, str(count))
    table.add_row("general instructions", str(num_general))
    table.add_row("written", str(len(selection.traces) + num_general))
    console.print(table)


def _refuse(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(BAD_INPUT)
