"""JSON Lines that a process of a run appends to, and that any may read meanwhile.

A last line that was not written to its end does not count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 20


class DamagedRows(ValueError):
    """A line that is no JSON object; names file and line."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none if it is not there. Raises DamagedRows."""
    return [row for row, _ in _rows(path)]


def keep_rows(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Drops the other rows of a file. It is replaced, so that a reader can tell.

    Raises DamagedRows, and then the file is as it was.
    """
    if not path.exists():
        return
    kept = b"".join(line for row, line in _rows(path) if wanted(row))
    if len(kept) != path.stat().st_size:
        draft = path.with_name(f"{path.name}.partial")
        draft.write_bytes(kept)
        draft.replace(path)


def drop_last_rows(path: Path, unwanted: Callable[[dict[str, Any]], bool]) -> None:
    """Drops rows from the end as long as they are unwanted, and a line that was not written to its
    end. Reads what it drops and one row more: for files that are too large to be read whole.

    Raises DamagedRows, and then the file is as it was.
    """
    if not path.exists():
        return
    kept_bytes = size = path.stat().st_size
    for offset, line in lines_from_end(path):
        if line.endswith(b"\n") and not unwanted(_row(line, f"{path}: at byte {offset}")):
            break
        kept_bytes = offset
    if kept_bytes != size:
        os.truncate(path, kept_bytes)


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Where each line begins, and the line; the last one first, which may lack its end."""
    with path.open("rb") as file:
        begin, buffer = file.seek(0, os.SEEK_END), b""
        while begin or buffer:
            newline = buffer.rfind(b"\n", 0, max(0, len(buffer) - 1))
            if newline >= 0 or not begin:
                yield begin + newline + 1, buffer[newline + 1 :]
                buffer = buffer[: newline + 1]
                continue
            length = min(begin, BLOCK_BYTES)
            begin = file.seek(begin - length)
            buffer = file.read(length) + buffer


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Each with its line."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            return
        yield _row(line, f"{path}: line {number}"), line


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DamagedRows(f"{where} is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise DamagedRows(f"{where} is no JSON object")
    return row
