"""`magistral audit run`: proves from the journal what became of every prompt group of a run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from megatron_magistral.jsonl import DamagedRows, read_rows
from megatron_magistral.rollout.audit import Fate, Report, audit
from megatron_magistral.rollout.journal import JournalError, read_journal, segments_of
from megatron_magistral.run_folder import RunFolder, Stage

VIOLATED = 1
BAD_INPUT = 2
MAX_SHOWN = 20


def audit_run(run: RunFolder) -> Report:
    """Raises JournalError if there is no journal, or it is damaged; DamagedRows of the metrics."""
    if not run.root.is_dir():
        raise JournalError(f"{run.root}: there is no such folder")
    if not segments_of(run.journal):
        raise JournalError(f"{run.journal}: has no journal: the RL stage has not begun")
    return audit(
        read_journal(run.journal),
        recorded_steps=_recorded_steps(run),
        has_ended=run.is_finished(Stage.RL),
    )


def audit_run_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    report: Annotated[
        Path | None, typer.Option(help="Write a JSON line for each group to this file.")
    ] = None,
) -> None:
    """Prove that each prompt group was trained once, dropped, failed, or is still open.

    Exit code 1, and the names of what is wrong, if that is not so.
    """
    console = Console(highlight=False, soft_wrap=True)
    try:
        found = audit_run(RunFolder(run))
        if report is not None:
            lines = (json.dumps(asdict(row)) for row in found.rows)
            report.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except (JournalError, DamagedRows) as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}")
    console.print(_table(found))
    for reason, count in _failures(found).most_common(MAX_SHOWN):
        console.print(f"failed {count} x: {reason}", markup=False)
    for finding in found.findings[:MAX_SHOWN]:
        console.print(str(finding), style="red", markup=False)
    if left := len(found.findings) - MAX_SHOWN:
        console.print(f"... and {left} more", style="red") if left > 0 else None
    verdict = f"{len(found.findings)} violations" if found.findings else "nothing lost, none twice"
    console.print(f"{verdict} in {found.num_steps} steps, begun {found.num_begun} times")
    if found.findings:
        raise typer.Exit(VIOLATED)


def _refuse(message: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(message, style="red", markup=False)
    raise typer.Exit(BAD_INPUT)


def _table(found: Report) -> Table:
    table = Table("groups", "count", "tokens", "steps from admission", "oldest token")
    for fate in Fate:
        rows = [row for row in found.rows if row.fate is fate]
        waits = [row.step - row.version for row in rows if row.step is not None]
        ages = [row.step - row.oldest for row in rows if row.step is not None and row.oldest >= 0]
        table.add_row(
            fate.value,
            str(len(rows)),
            str(sum(row.num_tokens for row in rows)),
            f"mean {sum(waits) / len(waits):.2f}, max {max(waits)}" if waits else "",
            f"max {max(ages)} steps" if ages else "",
        )
    return table


def _failures(found: Report) -> Counter[str]:
    return Counter(row.reason for row in found.rows if row.fate is Fate.FAILED)


def _recorded_steps(run: RunFolder) -> set[int]:
    """Steps of the RL stage that the metrics tell of."""
    return {row["step"] for row in read_rows(run.metrics) if row.get("stage") == Stage.RL}
