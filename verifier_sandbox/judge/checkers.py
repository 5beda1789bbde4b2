"""Comparing a program's output with what is expected. Pure.

An output is hostile: time and memory are linear in its length, whatever it holds, and bounded by
the first difference. What is expected is trusted.

Integers are exact, always: nothing here turns `1000000007` into a float. A tolerance applies only
where the problem asked for one, and only to tokens expected as decimal fractions.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from verifier_sandbox.protocol import Checker, CheckerKind

_CHUNK = 1 << 16
_BLANKS = b" \t\n\r\v\f"
_FRACTION = re.compile(rb"[+-]?(\d{1,400}\.\d{0,400}|\.\d{1,400}|\d{1,400})([eE][+-]?\d{1,3})?")
_INTEGER = re.compile(rb"[+-]?\d+")
_LONGEST_FRACTION = 1024
# How much longer than its author's a right value's JSON can be: 26 bytes for the `0.5,` of a float
# are the most for a number, `\\ud83d\\ude00` for one character in a string.
_JSON_STRETCH, _JSON_SLACK = 16, 1024
_STRUCTURE = ("[", "{", ",")


def output_matches(checker: Checker, output: bytes, expected: bytes) -> bool:
    """Whether `output` answers a test of standard output."""
    if checker.kind is CheckerKind.EXACT:
        return output == expected
    if checker.kind is CheckerKind.LINES:
        lines = itertools.zip_longest(_lines(output), _lines(expected))
        return all(ours == theirs for ours, theirs in lines)
    if output == expected:
        return True
    longest = max(len(expected), _LONGEST_FRACTION)
    pairs = itertools.zip_longest(tokens(output, longest), tokens(expected))
    if checker.kind is CheckerKind.TOKENS:
        return all(ours == theirs for ours, theirs in pairs)
    return all(
        ours == theirs
        or (ours is not None and theirs is not None and _close_tokens(checker, ours, theirs))
        for ours, theirs in pairs
    )


def tokens(text: bytes, longest: int = sys.maxsize) -> Iterator[bytes]:
    """Whitespace-separated tokens. The first that is longer than `longest` may come cut, and is
    then the last."""
    rest, at = b"", 0
    while at < len(text):
        size = max(_CHUNK, len(rest))  # doubles within a long token: its pieces are joined in O(n)
        piece = rest + text[at : at + size]
        at += size
        words = piece.split()
        rest = b""
        if words and at < len(text) and not piece[-1:].isspace():
            rest = words.pop()
        yield from words
        if len(rest) > longest:
            yield rest
            return


def _lines(text: bytes) -> Iterator[bytes]:
    return (line.rstrip(_BLANKS) for line in io.BytesIO(text.rstrip(_BLANKS)))


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


def parse_json(text: str | bytes) -> Any:
    """A JSON value whose integers are Decimals: exact, of any length, and in linear time, where
    `int` takes quadratic time and refuses more than 4300 digits.

    Raises ValueError, or RecursionError for a value nested too deep.
    """
    return json.loads(text, parse_int=Decimal)


def result_matches(checker: Checker, output: bytes, expected: str) -> bool:
    """Whether a function's result, printed as JSON by the driver, is the expected JSON value."""
    if not _may_be_as_small_as(output, expected):
        return False
    try:
        ours = parse_json(output)
    except (ValueError, RecursionError):
        return False
    return _same_value(checker, ours, parse_json(expected))


def _may_be_as_small_as(output: bytes, expected: str) -> bool:
    """False where `output` has too many bytes or parts to be the expected value: a flood of
    brackets takes twenty times its length in memory once parsed."""
    if len(output) > _JSON_STRETCH * len(expected) + _JSON_SLACK:
        return False
    if "\\u00" in expected:  # a comma may be written so, and need not be
        return True
    return all(output.count(mark.encode()) <= expected.count(mark) for mark in _STRUCTURE)


def _same_value(checker: Checker, ours: Any, theirs: Any) -> bool:
    """JSON values, as `parse_json` makes them. A stack of our own: they may be nested deep."""
    pairs = [(ours, theirs)]
    while pairs:
        ours, theirs = pairs.pop()
        if isinstance(ours, list) and isinstance(theirs, list):
            if len(ours) != len(theirs):
                return False
            pairs.extend(zip(ours, theirs, strict=True))
        elif isinstance(ours, dict) and isinstance(theirs, dict):
            if ours.keys() != theirs.keys():
                return False
            pairs.extend((ours[key], value) for key, value in theirs.items())
        elif not _same_scalar(checker, ours, theirs):
            return False
    return True


def _same_scalar(checker: Checker, ours: Any, theirs: Any) -> bool:
    """True is not 1, and 1 is 1.0 only where nothing was rounded."""
    if isinstance(ours, bool) or isinstance(theirs, bool):
        return ours is theirs
    if isinstance(theirs, float) and isinstance(ours, float | Decimal):
        if math.isnan(theirs):
            return math.isnan(ours)
        if checker.kind is CheckerKind.FLOATS and math.isfinite(theirs):
            return _close(checker, float(ours), theirs)
    return bool(ours == theirs)
