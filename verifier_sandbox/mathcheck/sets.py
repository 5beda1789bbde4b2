"""Sets of real numbers: intervals, unions, inequalities and finite sets, compared as sets.

First by their end points as expressions, which also serves symbolic ones; then, for one variable
and numeric end points, by membership at every end point of either side and between them.
"""

from __future__ import annotations

from itertools import pairwise

from . import equality
from .answers import (
    Answer,
    Conditions,
    Interval,
    Membership,
    NumberSet,
    Order,
    Quantity,
    Relation,
    Sequence_,
    SetOperation,
)
from .intervals import FLIPPED, contains_infinity, pieces_of
from .nodes import Node, subtract
from .numeric import WorkBudget
from .real_sets import RealSet, agree_everywhere, is_empty, variables
from .result import Undefined, Unreadable


def is_set(answer: Answer) -> bool:
    """Whether the answer can be read as a set of real numbers."""
    if isinstance(answer, Relation):
        return not set(answer.relations) <= {"=", "~"}
    if isinstance(answer, Sequence_):
        return answer.order is not Order.TUPLE and all(
            isinstance(item, Relation | Interval | Membership | SetOperation)
            or (answer.order is Order.SET and isinstance(item, Quantity))
            for item in answer.items
        )
    return isinstance(answer, Interval | SetOperation | NumberSet | Conditions)


def _may_be_set(answer: Answer) -> bool:
    return is_set(answer) or isinstance(answer, Sequence_ | Membership)


def _as_conditions(answer: Answer, budget: WorkBudget) -> Answer:
    """A list of relations means all of them, or any of them if they exclude each other."""
    if (
        not isinstance(answer, Sequence_)
        or not answer.items
        or not all(isinstance(item, Relation) for item in answer.items)
    ):
        return answer
    together = Conditions("and", answer.items)
    try:
        contradicts = is_empty(RealSet(together, budget))
    except (Unreadable, Undefined):
        contradicts = False
    return Conditions("or", answer.items) if contradicts else together


def same_set(left: Answer, right: Answer, budget: WorkBudget) -> bool:
    """Whether two answers describe the same set of real numbers."""
    if isinstance(left, NumberSet) and isinstance(right, NumberSet):
        return left.name == right.name
    if not (_may_be_set(left) and _may_be_set(right)):
        return False
    left, right = (_as_conditions(answer, budget) for answer in (left, right))
    names = [variables(answer) for answer in (left, right)]
    if names[0] and names[1] and names[0] != names[1]:
        return False  # x > 2 does not answer y > 2
    pieces = [pieces_of(answer) for answer in (left, right)]
    if (
        pieces[0] is not None
        and pieces[1] is not None
        and _same_pieces(pieces[0], pieces[1], budget)
    ):
        return True
    if _same_atoms(left, right, budget):
        return True
    try:
        sets = [RealSet(answer, budget) for answer in (left, right)]
        return agree_everywhere(sets[0], sets[1])
    except (Unreadable, Undefined):
        return False


def _same_pieces(left: list[Interval], right: list[Interval], budget: WorkBudget) -> bool:
    return (
        len(left) == len(right)
        and all(any(_same_interval(a, b, budget) for b in right) for a in left)
        and all(any(_same_interval(a, b, budget) for a in left) for b in right)
    )


def _same_interval(left: Interval, right: Interval, budget: WorkBudget) -> bool:
    return _same_end(left.low, right.low, left.has_low, right.has_low, budget) and _same_end(
        left.high, right.high, left.has_high, right.has_high, budget
    )


def _same_end(left: Node, right: Node, has_left: bool, has_right: bool, budget: WorkBudget) -> bool:
    if not equality.equal(left, right, budget):
        return False
    return has_left == has_right or contains_infinity(left)


def _atoms(answer: Answer) -> list[tuple[Node, str]] | None:
    """Each inequality as `expression < 0`, `<= 0`, `= 0` or `!= 0`."""
    if isinstance(answer, Conditions):
        parts = [_atoms(part) for part in answer.parts]
        if any(part is None for part in parts):
            return None
        return [atom for part in parts if part is not None for atom in part]
    if not isinstance(answer, Relation):
        return None
    atoms = []
    for (left, right), relation in zip(pairwise(answer.sides), answer.relations, strict=True):
        if relation in (">", ">="):
            left, right, relation = right, left, FLIPPED[relation]
        atoms.append((subtract(left, right), relation))
    return atoms


def _connectives(answer: Answer) -> set[str]:
    """How the inequalities of the answer are joined: 1 < x < 5 is 1 < x "and" x < 5."""
    if isinstance(answer, Conditions):
        return {answer.joined_by}.union(*map(_connectives, answer.parts))
    return {"and"} if isinstance(answer, Relation) and len(answer.relations) > 1 else set()


def _same_atoms(left: Answer, right: Answer, budget: WorkBudget) -> bool:
    """Whether both sides consist of the same inequalities up to positive factors."""
    connectives = [_connectives(answer) for answer in (left, right)]
    if connectives[0] != connectives[1] or len(connectives[0]) > 1:
        return False
    atoms = [_atoms(answer) for answer in (left, right)]
    if atoms[0] is None or atoms[1] is None or len(atoms[0]) != len(atoms[1]):
        return False

    def matches(a: tuple[Node, str], b: tuple[Node, str]) -> bool:
        return a[1] == b[1] and (
            equality.equal(a[0], b[0], budget)
            or equality.proportional(a[0], b[0], budget, positive=a[1] in ("<", "<="))
        )

    return all(any(matches(a, b) for b in atoms[1]) for a in atoms[0]) and all(
        any(matches(a, b) for a in atoms[0]) for b in atoms[1]
    )
