"""Letters without a text command: a word, a function with its argument, or a product."""

from __future__ import annotations

from . import words
from .name_tables import name_set
from .units import BARE as BARE_UNITS

_VOWELS = frozenset("aou")  # not e and i, which are constants in a product
_SHORT_WORDS = name_set("is of to per cent por by es est ist sont son")
_GLUED_FUNCTIONS = name_set("sin cos tan cot sec csc ln log sqrt arctan arcsin arccos exp")


def looks_like_a_word(run: str) -> bool:
    """Whether bare letters are a word rather than a product of variables."""
    plain = run.casefold()
    if plain in words.AND or plain in words.OR or plain in words.NEGATIONS or plain in words.HEDGES:
        return plain not in words.ONLY_QUOTED
    if plain in BARE_UNITS or words.number_from_words(plain) is not None or plain in words.SCALES:
        return True
    if plain in words.SYNONYMS or plain in words.LEADING or "-" in run or plain in words.INFINITY:
        return True
    if plain in words.ARTICLES | _SHORT_WORDS and len(run) > 1:
        return True
    if len(run) >= 5:
        return function_prefix(run) is None
    if run[0].isupper() and run[1:].islower():
        return len(run) > 2 or plain in ("no", "am", "pm")
    if set(run) <= set("abcdxyz"):
        return False
    return len(run) >= 3 and ("o" in plain or bool(_VOWELS & set(run[1:])))


def function_prefix(run: str) -> str | None:
    """A function name glued to its argument: sinx, sqrtx, cosxy."""
    for length in range(min(6, len(run) - 1), 1, -1):
        if run[:length] in _GLUED_FUNCTIONS and len(run) - length <= 2:
            return run[:length]
    return None
