"""What a person sees of a run: a panel in a terminal, plain lines elsewhere, the final table."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from megatron_magistral.evals.report import EvalReport, Score

NOT_MEASURED = "–"

# What the live view and the plain lines show, in order: label, key in metrics.jsonl, format.
SFT_COLUMNS = (
    ("loss", "loss", "{:.3f}"),
    ("lr", "lr", "{:.1e}"),
    ("gradient norm", "grad_norm", "{:.2f}"),
    ("tokens/s", "train_tokens_per_s", "{:.0f}"),
)
RL_COLUMNS = (
    ("reward", "reward_mean", "{:.3f}"),
    ("of it format", "reward_format", "{:.3f}"),
    ("correctness", "reward_correctness", "{:.3f}"),
    ("language", "reward_language", "{:.3f}"),
    ("length", "reward_length", "{:.3f}"),
    ("tokens a completion", "completion_tokens_mean", "{:.1f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("generated tokens/s", "generated_tokens_per_s", "{:.0f}"),
    ("queue", "queue_sequences", "{:.0f}"),
    ("staleness", "staleness_mean", "{:.2f}"),
    ("weight update s", "update_total_s", "{:.3f}"),
)
COLUMNS = {"sft": SFT_COLUMNS, "rl": RL_COLUMNS}


class MetricsReader:
    """Follows a metrics.jsonl that another process writes; a half-written last line waits.

    Rows from before `since` are not shown. A file that is replaced, by one with less in it, is read
    again from its start, but for the rows that were shown.
    """

    def __init__(self, path: Path, since: float = 0.0) -> None:
        self._path = path
        self._since = self._newest = since
        self._file_number: int | None = None
        self._offset = 0

    def new_rows(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            if number != self._file_number:
                self._file_number, self._offset, self._since = number, 0, self._newest
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                row = json.loads(line)
                if self._since and row["time"] <= self._since:
                    continue
                self._newest = row.get("time", self._newest)
                yield row


class RunView:
    """Shows the newest row of metrics.jsonl. A context manager; call `refresh` now and then."""

    def __init__(
        self,
        console: Console,
        metrics: Path,
        num_steps: Mapping[str, int],
        phase: Path,
        since: float = 0.0,
    ) -> None:
        self._console = console
        self._reader = MetricsReader(metrics, since)
        self._phase_file = phase
        self._num_steps = num_steps
        self._phase, self._said = "starting", ""
        self._row: dict[str, Any] = {}
        self._stage_begin: dict[str, tuple[int, float]] = {}
        self._live = Live(
            console=console, refresh_per_second=4, get_renderable=self._panel, transient=True
        )

    def phase(self, text: str) -> None:
        """Say what the run does now, where no step tells it."""
        self._phase, self._row = text, {}
        if not self._console.is_terminal:
            self._console.print(text, highlight=False)

    def refresh(self) -> None:
        if self._phase_file.exists():
            said = self._phase_file.read_text(encoding="utf-8")
            if said and said != self._said:
                self._said = said
                self.phase(said)
        for row in self._reader.new_rows():
            self._row = row
            self._stage_begin.setdefault(row["stage"], (row["step"], row["time"]))
            if not self._console.is_terminal:
                self._console.print(self._line(row), highlight=False, soft_wrap=True)

    def __enter__(self) -> RunView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def _progress(self, row: Mapping[str, Any]) -> str:
        total = self._num_steps.get(row["stage"])  # None where epochs are given
        of_total = "" if total is None else f"/{total}"
        return f"{row['stage']} {row['step'] + 1}{of_total}"

    def _eta(self, row: Mapping[str, Any]) -> str:
        first_step, begin = self._stage_begin[row["stage"]]
        done = row["step"] - first_step
        total = self._num_steps.get(row["stage"])
        if done < 1 or total is None:
            return NOT_MEASURED
        remaining = total - row["step"] - 1
        seconds = remaining * (row["time"] - begin) / done - (time.time() - row["time"])
        return time.strftime("%H:%M:%S", time.gmtime(max(0.0, seconds)))

    def _line(self, row: Mapping[str, Any]) -> str:
        cells = [f"{label} {_format(row, key, form)}" for label, key, form in COLUMNS[row["stage"]]]
        return f"{self._progress(row)}  " + "  ".join([*cells, f"ends in {self._eta(row)}"])

    def _panel(self) -> Panel:
        if not self._row:
            return Panel(self._phase, title="magistral")
        grid = Table.grid(padding=(0, 2))
        for label, key, form in COLUMNS[self._row["stage"]]:
            grid.add_row(label, _format(self._row, key, form))
        ended = time.strftime("%H:%M:%S", time.localtime(self._row["time"]))
        grid.add_row("last step and weight update", ended)
        grid.add_row("stage ends in", self._eta(self._row))
        return Panel(grid, title=self._progress(self._row), subtitle=self._phase)


def final_table(before: EvalReport, after: EvalReport) -> Table:
    """Held-out results before and after RL, side by side."""
    samples = int(after.protocol["num_samples"])
    table = Table(
        title=f"Held-out problems, pass@1 over {samples} samples at temperature "
        f"{after.protocol['temperature']:g}"
    )
    for heading in ("", "problems", "before RL", "after RL", "change"):
        table.add_column(heading, justify="left" if not heading else "right")
    _add_scores(table, "all", before.overall, after.overall)
    for category in after.by_category:
        _add_scores(table, category, before.by_category[category], after.by_category[category])
    for language in after.by_language:
        _add_scores(
            table,
            f"language {language}",
            before.by_language[language],
            after.by_language[language],
        )
    table.add_section()
    for label, key in (
        ("mean reward", "mean_reward"),
        ("format rate", "format_rate"),
        ("language consistency", "language_rate"),
        ("tokens a completion", "mean_num_tokens"),
        ("truncated", "truncated_rate"),
    ):
        _add_row(table, label, "", getattr(before, key), getattr(after, key))
    table.add_row("masked samples", "", str(before.num_masked), str(after.num_masked), "")
    return table


def _add_scores(table: Table, label: str, before: Score, after: Score) -> None:
    _add_row(table, label, str(after.num_problems), before.pass_at_1, after.pass_at_1)


def _add_row(
    table: Table, label: str, count: str, before: float | None, after: float | None
) -> None:
    if before is None or after is None:
        cells = [NOT_MEASURED if value is None else f"{value:.3f}" for value in (before, after)]
        table.add_row(label, count, *cells, NOT_MEASURED)
        return
    table.add_row(label, count, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")


def _format(row: Mapping[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    return NOT_MEASURED if value is None else form.format(value + 0.0)  # no -0.000
