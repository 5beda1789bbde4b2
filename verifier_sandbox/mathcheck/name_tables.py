"""Write a table of names as text: one string instead of a column of quotes."""

from __future__ import annotations


def name_list(*lines: str) -> list[str]:
    """The names in the lines, separated by spaces, in order."""
    return " ".join(lines).split()


def name_set(*lines: str) -> frozenset[str]:
    """The names in the lines as a set."""
    return frozenset(name_list(*lines))
