"""Fenced code blocks: the code gate looks for them, the language axis looks past them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<ticks>`{3,})(?P<info>[^`\n]*)$")


@dataclass(frozen=True)
class FencedBlock:
    """A code block between fences of three or more backticks; `tag` is the word after the first."""

    tag: str
    source: str


@dataclass(frozen=True)
class _Fence:
    ticks: int
    tag: str
    indent: str


def split_fences(text: str) -> tuple[list[FencedBlock], str]:
    """The closed fenced blocks of a text in order, and the text without any fenced block.

    A fence that is never closed opens no block, but what follows it is no prose either: it is
    missing from both. The indentation of the opening fence is taken off the source's lines.
    """
    blocks: list[FencedBlock] = []
    prose: list[str] = []
    source: list[str] = []
    opening: _Fence | None = None
    for line in text.split("\n"):
        fence = _fence(line.rstrip())
        if opening is None:
            if fence is None:
                prose.append(line)
            else:
                opening, source = fence, []
        elif fence is not None and fence.ticks >= opening.ticks and not fence.tag:
            blocks.append(FencedBlock(opening.tag, "".join(source)))
            opening = None
        else:
            source.append(line.removeprefix(opening.indent) + "\n")
    return blocks, "\n".join(prose)


def _fence(line: str) -> _Fence | None:
    match = _FENCE.match(line)
    if match is None:
        return None
    words = match["info"].split()
    return _Fence(len(match["ticks"]), words[0] if words else "", match["indent"])
