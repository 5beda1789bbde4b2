"""The shapes of an answer. Shapes that differ are unequal, except over the bridges of `compare`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .nodes import Node


@dataclass(frozen=True)
class Quantity:
    """An expression, with the canonical name of its unit or "" for none."""

    node: Node
    unit: str = ""
    has_plain_unit: bool = field(default=True, compare=False)
    """Whether the words after the number are known units and nouns, which may be left out."""


@dataclass(frozen=True)
class Words:
    """Plain words, in the spelling of `words.plain_words`."""

    text: str


class Order(Enum):
    """How the elements of a sequence were written."""

    LIST = "list"  # without brackets
    SET = "set"
    TUPLE = "tuple"


@dataclass(frozen=True)
class Sequence_:
    """Several answers."""

    order: Order
    items: tuple[Answer, ...]
    is_disjunction: bool = False
    """Whether "or" stands between the items: the roots of one unknown, or a hedge."""


@dataclass(frozen=True)
class Interval:
    """Real numbers between two end points, each included or not."""

    low: Node
    high: Node
    has_low: bool
    has_high: bool


@dataclass(frozen=True)
class SetOperation:
    """A union, intersection or difference ("cup", "cap", "setminus") of sets, from the left."""

    operators: tuple[str, ...]
    parts: tuple[Answer, ...]


@dataclass(frozen=True)
class NumberSet:
    """R, Z, N, Q or C, or one of these with a sign mark (R^+)."""

    name: str


@dataclass(frozen=True)
class Relation:
    """A chain of expressions: sides[0] relations[0] sides[1] ..."""

    sides: tuple[Node, ...]
    relations: tuple[str, ...]


@dataclass(frozen=True)
class Conditions:
    """Relations joined by "and" or by "or"."""

    joined_by: str
    parts: tuple[Answer, ...]


@dataclass(frozen=True)
class Assignment:
    """A name and what it equals. `name_node` is the name as an expression, if it is one."""

    name: str
    value: Answer
    name_node: Node | None = None
    is_label: bool = field(default=True, compare=False)
    """Whether it only says what the value is of: x = 5, f(2) = 5, but not |x| = 5."""


@dataclass(frozen=True)
class Membership:
    """A name that is, or is not, an element of a set."""

    name: str
    container: Answer
    is_member: bool = True


@dataclass(frozen=True)
class Family:
    """Answers with a parameter that runs through a number set: k pi for all integers k."""

    answer: Answer
    parameter: str
    domain: str


@dataclass(frozen=True)
class Based:
    """Digits with the base they are written in."""

    digits: str
    base: int

    @property
    def value(self) -> int | None:
        """The number, or None if a digit does not exist in the base."""
        try:
            return int(self.digits, self.base)
        except ValueError:
            return None


@dataclass(frozen=True)
class Clock:
    """A time of day in seconds. `half` is "am", "pm" or ""."""

    seconds: int
    half: str = ""


@dataclass(frozen=True)
class Ratio:
    """a : b : ..."""

    terms: tuple[Node, ...]
    clock: Clock | None = None
    """The same text as a time of day, where it could be one."""
    is_spelled: bool = field(default=False, compare=False)
    """Whether it is written with "to", as a range may be."""


@dataclass(frozen=True)
class Congruence:
    """value modulo modulus, with the name of the unknown or ""."""

    value: Node
    modulus: Node
    name: str = ""


@dataclass(frozen=True)
class Date:
    """Year, month and day; 0 where it is not said."""

    year: int
    month: int
    day: int


@dataclass(frozen=True)
class Phrase:
    """Words and mathematics mixed, or a pattern with dots: compared part by part."""

    parts: tuple[str | Answer, ...]


Answer = (
    Quantity
    | Words
    | Sequence_
    | Interval
    | SetOperation
    | NumberSet
    | Relation
    | Conditions
    | Assignment
    | Membership
    | Family
    | Based
    | Clock
    | Ratio
    | Congruence
    | Date
    | Phrase
)
