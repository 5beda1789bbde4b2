"""Problems and traces on disk: one JSON object a line, of exactly the fields of `types.py`.

A bad row never stops a run and is never lost: it is set aside with its file, its line number and
what is wrong with it, reading goes on, and the caller gets the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from megatron_magistral.types import Kind, Problem, Trace

Row = TypeVar("Row", bound=msgspec.Struct)

LANGUAGES = ("en", "fr", "es", "it", "de", "zh", "ru")


@dataclass(frozen=True)
class BadRow:
    """A line that was set aside. `line` counts from 1."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class Rows(Generic[Row]):
    """What a file held: the good rows in file order and the ones set aside."""

    rows: tuple[Row, ...]
    bad: tuple[BadRow, ...]

    def summary(self) -> str:
        return f"{len(self.rows)} rows read, {len(self.bad)} set aside"


def read_problems(path: Path) -> Rows[Problem]:
    """Read problems. Raises FileNotFoundError for a missing file, never for a bad row."""
    return read_rows(path, Problem, _problem_fault, lambda problem: problem.id)


def read_traces(path: Path) -> Rows[Trace]:
    """Read traces. One problem may have several. Raises FileNotFoundError for a missing file."""
    return read_rows(path, Trace, _trace_fault)


def write_rows(path: Path, rows: Iterable[Problem] | Iterable[Trace]) -> None:
    """Write one row a line, replacing the file whole: a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    encoder = msgspec.json.Encoder()
    with partial.open("wb") as file:
        for row in rows:
            file.write(encoder.encode(row) + b"\n")
    partial.replace(path)


def read_rows(
    path: Path,
    row_type: type[Row],
    fault: Callable[[Row], str | None],
    unique_id: Callable[[Row], str | None] = lambda row: None,
) -> Rows[Row]:
    """Read rows of any type, as `each_row`."""
    rows: list[Row] = []
    bad: list[BadRow] = []
    for row in each_row(path, row_type, fault, unique_id):
        if isinstance(row, BadRow):
            bad.append(row)
        else:
            rows.append(row)
    return Rows(tuple(rows), tuple(bad))


def each_row(
    path: Path,
    row_type: type[Row],
    fault: Callable[[Row], str | None],
    unique_id: Callable[[Row], str | None] = lambda row: None,
) -> Iterator[Row | BadRow]:
    """The rows of a file, one after the other. `fault` says what is wrong with one whose types are
    right; ids are unique in a file, None is none. Raises FileNotFoundError, never for a bad row."""
    decoder = msgspec.json.Decoder(row_type)
    first_line: dict[str, int] = {}
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                row = decoder.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                yield BadRow(path, line, str(error))
                continue
            reason = fault(row)
            row_id = unique_id(row)
            if reason is None and row_id is not None:
                seen = first_line.setdefault(row_id, line)
                if seen != line:
                    reason = f"id {row_id!r} was already used on line {seen}; ids must be unique"
            yield row if reason is None else BadRow(path, line, reason)


def _problem_fault(problem: Problem) -> str | None:
    """Why this problem could not be verified, or None. The types are already right."""
    if not problem.id:
        return "id is empty; give every problem a unique id"
    if not problem.statement.strip():
        return "statement is empty"
    if len(problem.language) != 2 or not problem.language.islower():
        return f"language is {problem.language!r}; give an ISO 639-1 code such as 'en'"
    if problem.kind is Kind.MATHS and not problem.reference.strip():
        return "a maths problem needs a non-empty reference"
    if problem.kind is Kind.CODE and not problem.tests:
        return "a programming problem needs at least one test"
    if problem.kind is Kind.CODE and problem.code_language is None:
        return "a programming problem needs code_language: 'python' or 'cpp'"
    return None


def _trace_fault(trace: Trace) -> str | None:
    if not (trace.statement.strip() or trace.prompt):
        return "statement is empty, and there is no prompt instead of it"
    if not trace.response.strip():
        return "response is empty"
    return None
