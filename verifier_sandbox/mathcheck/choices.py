"""Letters of multiple choice: B, (B), B., \\textbf{(B)}, B) with the text of the option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import words
from .name_tables import name_set
from .tokens import Kind, Token

_LETTERS = frozenset("ABCDEFGHIJ")
_SMALL_LETTERS = frozenset("abcdefgh")
_DOUBTS = name_set("not maybe perhaps possibly either probably 可能 不")


@dataclass(frozen=True)
class Choice:
    """The letter that was chosen, in upper case, and what the option says, if it is repeated."""

    letter: str
    option: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Choices:
    """Several letters in the order they were written."""

    letters: tuple[str, ...]
    is_together: bool
    """Whether nothing stands between them."""

    @property
    def is_sorted(self) -> bool:
        return list(self.letters) == sorted(self.letters)


def read_choice(tokens: Sequence[Token]) -> Choice | None:
    """The choice that the tokens name, or None if they are something else."""
    rest = list(tokens)
    while (
        len(rest) > 1 and rest[0].kind is Kind.TEXT and (rest[0].text.casefold() in words.LEADING)
    ):
        rest = rest[1:]
    rest = [
        token for token in rest if not token.is_(Kind.OPEN, "{") and not token.is_(Kind.CLOSE, "{")
    ]
    is_open = bool(rest) and rest[0].is_(Kind.OPEN, "(")
    if is_open:
        rest = rest[1:]
    if not rest or rest[0].kind is not Kind.LETTER:
        return None
    letter, tail = rest[0].text.upper(), rest[1:]
    if letter not in _LETTERS or (rest[0].text in ("e", "i") and not is_open):
        return None
    if not tail:
        return None if is_open else Choice(letter)
    mark = tail[0]
    if is_open:
        is_choice = mark.is_(Kind.CLOSE, "(") and _is_option(tail[1:])
        return Choice(letter, tuple(tail[1:])) if is_choice else None
    has_mark = (
        mark.is_(Kind.CLOSE, "(") or mark.is_(Kind.OPERATOR, ".") or mark.is_(Kind.SEPARATOR, ":")
    )
    return Choice(letter, tuple(tail[1:])) if has_mark and _is_option(tail[1:]) else None


def read_choices(tokens: Sequence[Token]) -> Choices | None:
    """The letters of an answer that is nothing but letters, such as A, C or ACB; else None."""
    letters = tuple(token.text for token in tokens if token.kind is Kind.LETTER)
    rest = [token for token in tokens if token.kind is not Kind.LETTER]
    has_separator = any(token.kind is Kind.SEPARATOR for token in rest)
    if len(letters) < 2 or any(
        token.is_(Kind.SEPARATOR, "or")
        or (token.kind is not Kind.SEPARATOR and token.text not in ("(", "{"))
        for token in rest
    ):
        return None
    are_capitals = all(len(letter) == 1 and letter.isupper() for letter in letters)
    is_order = len(letters) > 2 and set(letters) <= _SMALL_LETTERS and not has_separator
    return Choices(letters, not has_separator) if are_capitals or is_order else None


def same_choices(reference: Choices | None, prediction: Choices | None) -> bool | None:
    """Whether both name the same letters; None if one side is no choice of several.

    An order counts where it may say something: in BADC and in AC against CA, but not in A, C.
    Small letters in order are a product, if anything.
    """
    if reference is None or prediction is None:
        return None
    if reference.letters == prediction.letters:
        return True
    if reference.is_sorted and reference.letters[0].islower():
        return None
    if not reference.is_sorted or (reference.is_together and prediction.is_together):
        return False
    return sorted(reference.letters) == sorted(prediction.letters)


def _is_option(tokens: Sequence[Token]) -> bool:
    """Whether the rest can be the text of one option: not another letter, not a hedge."""
    return not any(
        token.is_(Kind.SEPARATOR, "or", "and")
        or (token.kind is Kind.LETTER and token.text.upper() in _LETTERS)
        or (token.kind is Kind.TEXT and _doubts(token.text))
        for token in tokens
    )


def _doubts(text: str) -> bool:
    return not _DOUBTS.isdisjoint(text.casefold().split())
