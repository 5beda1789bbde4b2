"""Rows of JSON-lines files: pairs of answers, and reference answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_SURROGATE = re.compile(r"[\ud800-\udfff]")


class BadRow(ValueError):
    """A row of the file, or the file, is not what is needed."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, at least one. Raises BadRow with the number of the line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BadRow(f"{path}: cannot be read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise BadRow(f"{path}:{number}: not UTF-8") from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise BadRow(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise BadRow(f"{path}:{number}: an object is needed, not {type(row).__name__}")
        rows.append(row)
    if not rows:
        raise BadRow(f"{path}: no rows; one JSON object a line is needed")
    return rows


def text_of(row: dict[str, Any], number: int, key: str) -> str:
    """The text under the key; a number counts as its digits. Raises BadRow."""
    value = row.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise BadRow(f"row {number}: {key!r} must be a string; it has {sorted(row)}")
    if _SURROGATE.search(value) is not None:
        raise BadRow(f"row {number}: {key!r} has half of a surrogate pair, which is no text")
    return value


def label_of(row: dict[str, Any], number: int) -> bool | None:
    """Whether the pair is labelled as a match; None if it has no label. Raises BadRow."""
    label = row.get("match")
    if label is not None and not isinstance(label, bool):
        raise BadRow(f"row {number}: 'match' must be true or false, not {label!r}")
    return label


def category_of(row: dict[str, Any], number: int) -> str:
    """The category of a pair, "-" if it has none. Raises BadRow."""
    return text_of(row, number, "category") if row.get("category") is not None else "-"
