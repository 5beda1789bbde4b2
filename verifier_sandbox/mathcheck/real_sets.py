"""Membership in a set of real numbers, and comparison of two sets by it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from . import policy
from .answers import (
    Answer,
    Assignment,
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
from .intervals import NUMBER_SETS, contains_infinity, pieces_of
from .nodes import Node, Op, contains, subtract, symbols
from .numeric import WorkBudget, context
from .result import Undefined, Unreadable
from .roots import candidate_roots
from .values import coarse_value_of, value_of


@dataclass(frozen=True)
class _Ends:
    low: Any
    high: Any


class RealSet:
    """A set of real numbers with a membership test and all points where it can change.

    Raises Unreadable if the answer is no set of numbers in one variable.
    """

    def __init__(self, answer: Answer, budget: WorkBudget) -> None:
        self._answer = answer
        self._budget = budget
        budget.spend(20)
        names = variables(answer)
        if len(names) > 1:
            raise Unreadable("a set in several variables")
        self.variable = next(iter(names), "")
        self.breakpoints: list[Any] = []
        self._ends: dict[int, _Ends] = {}
        self._collect(answer)

    def __contains__(self, x: Any) -> bool:
        self._budget.spend(2)
        return self._has(self._answer, x)

    def _collect(self, answer: Answer) -> None:
        if isinstance(answer, Interval):
            ends = _Ends(self._end(answer.low), self._end(answer.high))
            self._ends[id(answer)] = ends
            self.breakpoints += [end for end in (ends.low, ends.high) if _is_finite(end)]
        elif isinstance(answer, Quantity):
            point = coarse_value_of(answer.node, self._budget)
            self._ends[id(answer)] = _Ends(point, point)
            self.breakpoints.append(point)
        elif isinstance(answer, Relation):
            if not self.variable or any(contains(side, Op.APPLY) for side in answer.sides):
                raise Unreadable("a relation that describes no set of numbers")
            for left, right in pairwise(answer.sides):
                if self.variable not in symbols(left) | symbols(right):
                    raise Unreadable("a comparison of constants")
                self.breakpoints += candidate_roots(
                    subtract(left, right), self.variable, self._budget
                )
        elif isinstance(answer, Assignment | Membership):
            self._collect(answer.value if isinstance(answer, Assignment) else answer.container)
        elif isinstance(answer, SetOperation | Conditions):
            for part in answer.parts:
                self._collect(part)
        elif isinstance(answer, Sequence_) and answer.order is not Order.TUPLE:
            for item in answer.items:
                self._collect(item)
        elif isinstance(answer, Sequence_) and (pieces := pieces_of(answer)) is not None:
            ends = _Ends(self._end(pieces[0].low), self._end(pieces[0].high))
            self._ends[id(answer)] = ends
            self.breakpoints += [end for end in (ends.low, ends.high) if _is_finite(end)]
        elif isinstance(answer, NumberSet) and answer.name in NUMBER_SETS:
            for piece in NUMBER_SETS[answer.name]:
                self._collect(piece)
        else:
            raise Unreadable("not a set of real numbers")
        if len(self.breakpoints) > policy.MAX_ITEMS:
            raise Unreadable("too many end points")

    def _end(self, node: Node) -> Any:
        if contains_infinity(node):
            mp = context(policy.PRECISION_BITS)
            return mp.ninf if node.op is Op.NEGATE else mp.inf
        return coarse_value_of(node, self._budget)

    def _has(self, answer: Answer, x: Any) -> bool:
        if isinstance(answer, Interval):
            return _between(self._ends[id(answer)], x, answer.has_low, answer.has_high)
        if isinstance(answer, Quantity):
            return _same_point(self._ends[id(answer)].low, x)
        if isinstance(answer, Relation):
            return self._holds(answer, x)
        if isinstance(answer, Membership):
            return self._has(answer.container, x) == answer.is_member
        if isinstance(answer, Assignment):
            return self._has(answer.value, x)
        if isinstance(answer, SetOperation):
            return self._operation(answer, x)
        if isinstance(answer, Conditions):
            parts = [self._has(part, x) for part in answer.parts]
            return any(parts) if answer.joined_by == "or" else all(parts)
        if isinstance(answer, Sequence_):
            if answer.order is Order.TUPLE:
                return _between(self._ends[id(answer)], x, False, False)
            parts = [self._has(item, x) for item in answer.items]
            return any(parts)
        assert isinstance(answer, NumberSet)
        return any(self._has(piece, x) for piece in NUMBER_SETS[answer.name])

    def _operation(self, operation: SetOperation, x: Any) -> bool:
        inside = self._has(operation.parts[0], x)
        for operator, part in zip(operation.operators, operation.parts[1:], strict=True):
            also = self._has(part, x)
            inside = {"cup": inside or also, "cap": inside and also}.get(
                operator, inside and not also
            )
        return inside

    def _holds(self, relation: Relation, x: Any) -> bool:
        try:
            values = [value_of(side, self._budget, {self.variable: x}) for side in relation.sides]
        except Undefined:
            return False
        return all(
            _compared(left, right, name)
            for (left, right), name in zip(pairwise(values), relation.relations, strict=True)
        )


def variables(answer: Answer) -> frozenset[str]:
    """The names of the variables whose values the answer describes."""
    if isinstance(answer, Relation):
        return frozenset().union(*(symbols(side) for side in answer.sides))
    if isinstance(answer, SetOperation | Conditions):
        return frozenset().union(*(variables(part) for part in answer.parts))
    if isinstance(answer, Sequence_):
        return frozenset().union(*(variables(item) for item in answer.items))
    if isinstance(answer, Membership):
        return frozenset((answer.name,))
    return frozenset()


def agree_everywhere(left: RealSet, right: RealSet) -> bool:
    """Whether the sets have the same elements at all end points and between them."""
    if left.variable and right.variable and left.variable != right.variable:
        return False
    return all((x in left) == (x in right) for x in _probes(left.breakpoints + right.breakpoints))


def is_empty(real_set: RealSet) -> bool:
    """Whether the set has no element."""
    return not any(x in real_set for x in _probes(real_set.breakpoints))


def _probes(breakpoints: list[Any]) -> list[Any]:
    """All end points, a point between each two, and points outside."""
    mp = context(policy.PRECISION_BITS)
    ends: list[Any] = []
    for point in sorted(breakpoints):
        if not ends or not _same_point(ends[-1], point):
            ends.append(point)
    between = [(a + b) / 2 for a, b in pairwise(ends)]
    first, last = (ends[0], ends[-1]) if ends else (mp.mpf(0), mp.mpf(0))
    outside = [first - 1, first - 1000, last + 1, last + 1000]
    return [*ends, *between, *outside]


def _between(ends: _Ends, x: Any, has_low: bool, has_high: bool) -> bool:
    above = has_low if _same_point(ends.low, x) else ends.low < x
    below = has_high if _same_point(ends.high, x) else x < ends.high
    return bool(above and below)


def _compared(left: Any, right: Any, relation: str) -> bool:
    if _same_point(left, right):
        return relation in ("<=", ">=", "=")
    if relation == "!=":
        return True
    if relation in ("<", "<="):
        return bool(left < right)
    return relation in (">", ">=") and bool(left > right)


def _same_point(left: Any, right: Any) -> bool:
    if not _is_finite(left) or not _is_finite(right):
        return False
    return bool(abs(left - right) <= (1 + abs(right)) * 2.0**-120)


def _is_finite(value: Any) -> bool:
    return bool(value == value and abs(value) != float("inf"))
