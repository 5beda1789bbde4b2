"""How often each problem is solved, over a whole run: <run>/pass_rates.jsonl, a line a group.

A problem's rate is that of its latest groups, since the policy improves. A group that
is rolled out again after an interruption has the ordinal that it had, and counts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

LATEST_GROUPS = 2
"""Of a problem, that its rate is taken from."""


class GroupResult(msgspec.Struct, frozen=True):
    """What became of the completions of one prompt group."""

    ordinal: int
    problem: str
    num_graded: int
    num_solved: int


class PassRates:
    """The one writer of the file. Goes on with what the file has."""

    def __init__(self, path: Path) -> None:
        path.touch()
        written = _whole_lines(path)
        self._groups = _read(written)
        self._encoder = msgspec.json.Encoder()
        self._file = path.open("ab")
        self._file.truncate(len(written))

    def add(self, result: GroupResult) -> None:
        """Count a finished group, whatever becomes of it. Without a graded completion it says
        nothing of its problem."""
        if result.num_graded == 0:
            return
        self._file.write(self._encoder.encode(result) + b"\n")
        self._file.flush()
        _count(self._groups, result)

    def rates(self) -> dict[str, float]:
        """Share of completions that were solved, by problem; only of problems that were tried."""
        return _rates(self._groups)

    def close(self) -> None:
        self._file.close()


def read_pass_rates(path: Path) -> dict[str, float]:
    """As `PassRates.rates`, for a reader. Raises FileNotFoundError."""
    return _rates(_read(_whole_lines(path)))


def _whole_lines(path: Path) -> bytes:
    """All but a last line that was not written to its end."""
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _read(lines: bytes) -> dict[str, dict[int, GroupResult]]:
    groups: dict[str, dict[int, GroupResult]] = {}
    for result in msgspec.json.Decoder(GroupResult).decode_lines(lines):
        _count(groups, result)
    return groups


def _count(groups: dict[str, dict[int, GroupResult]], result: GroupResult) -> None:
    latest = groups.setdefault(result.problem, {})
    latest[result.ordinal] = result
    if len(latest) > LATEST_GROUPS:
        del latest[min(latest)]


def _rates(groups: Mapping[str, Mapping[int, GroupResult]]) -> dict[str, float]:
    return {
        problem: sum(group.num_solved for group in latest.values())
        / sum(group.num_graded for group in latest.values())
        for problem, latest in groups.items()
    }
