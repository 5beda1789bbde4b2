"""`magistral audit`: how the maths check judges a file of pairs or of reference answers."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from . import second_grader
from .checker import check
from .references import ReferenceStatus, audit_reference
from .result import MathResult, MathVerdict
from .rows import BadRow, category_of, label_of, read_rows, text_of

app = typer.Typer(no_args_is_help=True, help="Audit the maths check and reference answers.")
_MAX_ROWS_SHOWN = 20
_MAX_TEXT_SHOWN = 60
_REFERENCE_KEYS = ("gold", "answer", "reference", "solution")


@dataclass(frozen=True)
class JudgedPair:
    """One pair of the file with what the check says about it."""

    gold: str
    pred: str
    category: str
    expected: bool | None
    verdict: str
    reason: str
    cpu_ms: float

    @property
    def is_match(self) -> bool:
        return self.verdict == MathVerdict.CORRECT.value

    @property
    def error(self) -> str | None:
        """ "false negative", "false positive", or None."""
        if self.expected is None or self.expected == self.is_match:
            return None
        return "false negative" if self.expected else "false positive"


def judge_pairs(rows: Iterable[dict[str, Any]]) -> Iterator[JudgedPair]:
    """Check every pair. Raises BadRow if `gold` or `pred` is missing or `match` is no boolean."""
    for number, row in enumerate(rows, start=1):
        gold, pred = text_of(row, number, "gold"), text_of(row, number, "pred")
        category, expected = category_of(row, number), label_of(row, number)
        begin = time.process_time()
        result: MathResult = check(gold, pred)
        cpu_ms = (time.process_time() - begin) * 1e3
        yield JudgedPair(
            gold,
            pred,
            category,
            expected,
            result.verdict.value,
            result.reason,
            cpu_ms,
        )


@app.command()
def maths(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="JSON lines: gold, pred[, match].")
    ],
    report: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("maths_audit.json"),
    second: Annotated[bool, typer.Option(help="Ask math-verify too, if it is installed.")] = True,
    math_verify_python: Annotated[
        str | None, typer.Option(help="An interpreter that has math-verify.")
    ] = None,
) -> None:
    """Judge pairs; show errors by category, disagreements and the slowest pairs."""
    console = Console()
    _require_writable(report)
    if math_verify_python is not None and shutil.which(math_verify_python) is None:
        raise typer.BadParameter(f"--math-verify-python: {math_verify_python} is no program")
    try:
        judged = list(judge_pairs(read_rows(file)))
    except BadRow as error:
        raise typer.BadParameter(str(error)) from None
    _print_categories(console, judged)
    _print_pairs(console, "Errors", [pair for pair in judged if pair.error])
    slowest = sorted(judged, key=lambda pair: -pair.cpu_ms)[:10]
    _print_pairs(console, "Slowest", slowest)
    opinions = _opinions(judged, second, math_verify_python)
    disagreements = [
        pair
        for pair, opinion in zip(judged, opinions, strict=False)
        if opinion.is_match is not pair.is_match
    ]
    if opinions:
        _print_pairs(console, "math-verify disagrees", disagreements)
    else:
        console.print("math-verify is not installed: no second opinion")
    report.write_text(
        json.dumps(
            {
                "summary": _summary(judged),
                "errors": [asdict(pair) | {"error": pair.error} for pair in judged if pair.error],
                "slowest": [asdict(pair) for pair in slowest],
                "has_second_opinion": bool(opinions),
                "disagreements": [asdict(pair) for pair in disagreements],
            },
            ensure_ascii=False,
            indent=1,
        ),
        encoding="utf-8",
    )
    console.print(f"report: {report}")


@app.command()
def reference(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="JSON lines with one answer each.")
    ],
    key: Annotated[str | None, typer.Option(help="Which field holds the answer.")] = None,
    report: Annotated[Path, typer.Option(help="Where the report goes.")] = Path(
        "reference_audit.json"
    ),
) -> None:
    """Tell which reference answers cannot be verified: they do not match their own rewrites."""
    console = Console()
    _require_writable(report)
    try:
        answers = [_reference_of(row, number, key) for number, row in enumerate(read_rows(file), 1)]
    except BadRow as error:
        raise typer.BadParameter(str(error)) from None
    audits = [audit_reference(answer) for answer in answers]
    counts = Counter(audit.status for audit in audits)
    table = Table("status", "answers", "share")
    for status in ReferenceStatus:
        share = counts[status] / max(1, len(audits))
        table.add_row(status.value, str(counts[status]), f"{share:.1%}")
    console.print(table)
    unfit = [
        {"row": row, "answer": answer, "status": audit.status.value, "reason": audit.reason}
        for row, (answer, audit) in enumerate(zip(answers, audits, strict=True), start=1)
        if audit.status is not ReferenceStatus.VERIFIABLE
    ]
    for entry in unfit[:_MAX_ROWS_SHOWN]:
        console.print(
            f"row {entry['row']}: {_short(str(entry['answer']))}  {entry['status']}: "
            f"{_short(str(entry['reason']))}",
        )
    summary = {status.value: counts[status] for status in ReferenceStatus}
    report.write_text(
        json.dumps({"summary": summary, "unfit": unfit}, ensure_ascii=False, indent=1),
        encoding="utf-8",
    )
    console.print(f"report: {report}")


def _require_writable(report: Path) -> None:
    """Raise BadParameter if the report cannot be written, before the work instead of after it."""
    is_new = not report.exists()
    try:
        report.open("a", encoding="utf-8").close()
        if is_new:
            report.unlink()
    except OSError as error:
        reason = error.strerror or "no reason given"
        raise typer.BadParameter(f"--report: {report} cannot be written: {reason}") from None


def _reference_of(row: dict[str, Any], number: int, key: str | None) -> str:
    keys = (key,) if key else _REFERENCE_KEYS
    for name in keys:
        if isinstance(row.get(name), str | int | float) and not isinstance(row[name], bool):
            return text_of(row, number, name)
    raise BadRow(f"row {number}: no answer under {' or '.join(keys)}; it has {sorted(row)}")


def _opinions(
    judged: list[JudgedPair], wanted: bool, python: str | None
) -> list[second_grader.Opinion]:
    if not wanted:
        return []
    pairs = [(pair.gold, pair.pred) for pair in judged]
    try:
        if python is None:
            return second_grader.second_opinions(pairs)
        return second_grader.second_opinions(pairs, python)
    except second_grader.GraderMissing as error:
        if python is not None:
            raise typer.BadParameter(str(error)) from None
        return []


def _summary(judged: list[JudgedPair]) -> dict[str, Any]:
    labelled = [pair for pair in judged if pair.expected is not None]
    errors = Counter(pair.error for pair in judged if pair.error)
    return {
        "pairs": len(judged),
        "labelled": len(labelled),
        "accuracy": 1 - sum(errors.values()) / max(1, len(labelled)),
        "false_negatives": errors["false negative"],
        "false_positives": errors["false positive"],
        "verdicts": dict(Counter(pair.verdict for pair in judged)),
        "mean_cpu_ms": sum(pair.cpu_ms for pair in judged) / max(1, len(judged)),
    }


def _print_categories(console: Console, judged: list[JudgedPair]) -> None:
    table = Table("category", "pairs", "false negatives", "false positives", "mean ms", "max ms")
    for category in sorted({pair.category for pair in judged}):
        pairs = [pair for pair in judged if pair.category == category]
        errors = Counter(pair.error for pair in pairs)
        times_ms = [pair.cpu_ms for pair in pairs]
        table.add_row(
            _short(category),
            str(len(pairs)),
            str(errors["false negative"]),
            str(errors["false positive"]),
            f"{sum(times_ms) / len(times_ms):.2f}",
            f"{max(times_ms):.1f}",
        )
    console.print(table)
    console.print(_summary(judged))


def _print_pairs(console: Console, title: str, pairs: list[JudgedPair]) -> None:
    table = Table("category", "gold", "prediction", "verdict", "ms", title=title)
    for pair in pairs[:_MAX_ROWS_SHOWN]:
        table.add_row(
            _short(pair.category),
            _short(pair.gold),
            _short(pair.pred),
            _short(f"{pair.error or pair.verdict}: {pair.reason}"),
            f"{pair.cpu_ms:.1f}",
        )
    console.print(table)
    if len(pairs) > _MAX_ROWS_SHOWN:
        console.print(f"... and {len(pairs) - _MAX_ROWS_SHOWN} more in the report")


def _short(text: str) -> str:
    """A text for one cell, without the brackets that rich would read as markup."""
    shown = text if len(text) <= _MAX_TEXT_SHOWN else text[: _MAX_TEXT_SHOWN - 1] + "…"
    return shown.replace("[", r"\[").replace("\n", " ")
