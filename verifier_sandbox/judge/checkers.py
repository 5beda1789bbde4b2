"""Comparing a program's output with what is expected. Pure, and bounded by the first difference.

Integers are exact, always: nothing here turns `1000000007` into a float. A tolerance applies only
where the problem asked for one, and only to tokens expected as decimal fractions.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

from verifier_sandbox.protocol import Checker, CheckerKind

_CHUNK = 1 << 16
_BLANKS = b" \t\n\r\v\f"
_FRACTION = re.compile(rb"[+-]?(\d{1,400}\.\d{0,400}|\.\d{1,400}|\d{1,400})([eE][+-]?\d{1,3})?")
_INTEGER = re.compile(rb"[+-]?\d+")
_MISSING = object()


def output_matches(checker: Checker, output: bytes, expected: bytes) -> bool:
    """Whether `output` answers a test of standard output."""
    if checker.kind is CheckerKind.EXACT:
        return output == expected
    if checker.kind is CheckerKind.LINES:
        return _lines(output) == _lines(expected)
    if output == expected:
        return True
    pairs = itertools.zip_longest(tokens(output), tokens(expected), fillvalue=None)
    if checker.kind is CheckerKind.TOKENS:
        return all(ours == theirs for ours, theirs in pairs)
    return all(
        ours == theirs
        or (ours is not None and theirs is not None and _close_tokens(checker, ours, theirs))
        for ours, theirs in pairs
    )


def tokens(text: bytes) -> Iterator[bytes]:
    """Whitespace-separated tokens, a chunk at a time: a flood costs only up to its first error."""
    rest = b""
    for at in range(0, len(text), _CHUNK):
        piece = rest + text[at : at + _CHUNK]
        words = piece.split()
        rest = b""
        if words and piece[-1:] not in _BLANKS and at + _CHUNK < len(text):
            rest = words.pop()
        yield from words


def _lines(text: bytes) -> list[bytes]:
    return [line.rstrip(_BLANKS) for line in text.rstrip(_BLANKS).split(b"\n")]


def _close_tokens(checker: Checker, ours: bytes, theirs: bytes) -> bool:
    if not (_FRACTION.fullmatch(theirs) and _FRACTION.fullmatch(ours)):
        return False
    if _INTEGER.fullmatch(theirs):  # 3.000 is 3, but 3.0000001 is not
        return Decimal(ours.decode()) == Decimal(theirs.decode())
    return _close(checker, float(ours), float(theirs))


def _close(checker: Checker, ours: float, theirs: float) -> bool:
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return ours == theirs
    tolerance = max(checker.absolute_tolerance, checker.relative_tolerance * abs(theirs))
    return abs(ours - theirs) <= tolerance


def result_matches(checker: Checker, output: bytes, expected: str) -> bool:
    """Whether a function's result, printed as JSON by the driver, is the expected JSON value."""
    try:
        ours = json.loads(output)
    except (ValueError, RecursionError):
        return False
    return _same_value(checker, ours, json.loads(expected))


def _same_value(checker: Checker, ours: Any, theirs: Any) -> bool:
    """JSON values; true is not 1, and 1 is 1.0 only where nothing was rounded."""
    if isinstance(ours, bool) or isinstance(theirs, bool):
        return ours is theirs
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and _all_same(checker, zip(ours, theirs, strict=True))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        values = ((ours.get(key, _MISSING), value) for key, value in theirs.items())
        return ours.keys() == theirs.keys() and _all_same(checker, values)
    if checker.kind is CheckerKind.FLOATS and isinstance(theirs, float):
        return isinstance(ours, int | float) and _close(checker, float(ours), theirs)
    if isinstance(ours, float) and isinstance(theirs, float) and math.isnan(theirs):
        return math.isnan(ours)
    return bool(ours == theirs)


def _all_same(checker: Checker, pairs: Iterable[tuple[Any, Any]]) -> bool:
    return all(_same_value(checker, ours, theirs) for ours, theirs in pairs)
