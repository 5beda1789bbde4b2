"""Find the final answer of a response: the content of its last balanced box."""

from __future__ import annotations

import re
from typing import NamedTuple

# An escaped character (`\{`, `\\`) is consumed whole, so it never opens or closes a brace.
_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*\{|\\.|[{}]", re.DOTALL)
_BOX_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")


def has_box(text: str) -> bool:
    """Whether the text opens a box at all, balanced or not."""
    return _BOX_COMMAND.search(text) is not None


def last_boxed(text: str) -> str | None:
    r"""The content of the last balanced `\boxed{...}` or `\fbox{...}`, or None if there is none.

    Of nested boxes the outermost counts, with the inner ones in it, but a box that holds nothing
    but a box is that box. Braces escaped by a
    backslash do not count, a stray closing brace is ignored. One pass, linear in `len(text)`.
    """
    open_braces: list[int] = []  # start of the content if a box opened the brace, else -1
    boxes: list[_Box] = []  # those that are balanced and lie in no other balanced one
    for token in _TOKEN.finditer(text):
        lexeme = token.group()
        if lexeme == "}":
            if open_braces and (start := open_braces.pop()) >= 0:
                boxes.append(_merged(text, start, token.start(), boxes))
        elif lexeme == "{":
            open_braces.append(-1)
        elif lexeme.endswith("{") and len(lexeme) > 2:
            open_braces.append(token.end())
    return None if not boxes else text[boxes[-1].begin : boxes[-1].end]


class _Box(NamedTuple):
    """Where a box and its content lie in the text."""

    outer_begin: int
    outer_end: int
    begin: int
    end: int


def _merged(text: str, begin: int, end: int, boxes: list[_Box]) -> _Box:
    """The box with this content; the boxes inside it are taken off the list."""
    inner: _Box | None = None
    count = 0
    while boxes and boxes[-1].begin > begin:
        inner, count = boxes.pop(), count + 1
    outer_begin = text.rindex("\\", 0, begin)
    if inner is not None and count == 1:
        around = text[begin : inner.outer_begin], text[inner.outer_end : end]
        if not any(part.strip() for part in around):
            return _Box(outer_begin, end + 1, inner.begin, inner.end)
    return _Box(outer_begin, end + 1, begin, end)
