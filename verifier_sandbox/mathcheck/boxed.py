"""Find the final answer of a response: the content of its last balanced box."""

from __future__ import annotations

import re

# An escaped character (`\{`, `\\`) is consumed whole, so it never opens or closes a brace.
_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*\{|\\.|[{}]", re.DOTALL)
_BOX_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")


def has_box(text: str) -> bool:
    """Whether the text opens a box at all, balanced or not."""
    return _BOX_COMMAND.search(text) is not None


def last_boxed(text: str) -> str | None:
    r"""The content of the last balanced `\boxed{...}` or `\fbox{...}`, or None if there is none.

    Last means: the one that starts last, so of nested boxes the innermost. Braces escaped by a
    backslash do not count, a stray closing brace is ignored. One pass, linear in `len(text)`.
    """
    open_braces: list[int] = []  # start of the content if a box opened the brace, else -1
    last: tuple[int, int] | None = None
    for token in _TOKEN.finditer(text):
        lexeme = token.group()
        if lexeme == "}":
            if open_braces and (start := open_braces.pop()) >= 0:
                last = max(last or (-1, -1), (start, token.start()))
        elif lexeme == "{":
            open_braces.append(-1)
        elif lexeme.endswith("{") and len(lexeme) > 2:
            open_braces.append(token.end())
    return None if last is None else text[last[0] : last[1]]
