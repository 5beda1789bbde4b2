"""Compare two answers of any shape. Shapes that differ are unequal but for the bridges here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeGuard

from . import equality
from .answers import (
    Answer,
    Assignment,
    Conditions,
    Family,
    Interval,
    Membership,
    Order,
    Quantity,
    Relation,
    Sequence_,
)
from .approximations import is_rounding
from .glances import Glance, glance_at
from .intervals import are_intervals
from .named import (
    as_equation,
    describes,
    equates_choices,
    may_mean_the_same,
    name_in,
    names_in,
    renamed,
    spread,
    with_same_arguments,
    with_same_parameter,
    without_real_domain,
)
from .nodes import Node, Op, subtract
from .notations import same_notation
from .numeric import WorkBudget
from .quantities import quantities_equal
from .sets import is_set, same_set
from .signs import expand_signs

_MANY_PAIRS = 25  # from here on a first glance at all elements spares time
_EQUATIONS = frozenset(("=", "~"))
_COORDINATES = frozenset("xyz")  # known by their names in whatever order they are written


class Comparison:
    """One comparison of a reference with a prediction, under one budget of work."""

    def __init__(self, budget: WorkBudget) -> None:
        self._budget = budget

    def equal(self, reference: Answer, prediction: Answer) -> bool:
        """Whether the prediction answers the reference. Raises TooBig."""
        self._budget.spend(2)
        if reference == prediction:
            return True
        if isinstance(prediction, Relation) and _is_equation(prediction):
            return self._equations(reference, prediction, prediction)
        if isinstance(reference, Relation) and _is_equation(reference):
            return self._equations(reference, prediction, reference)
        if isinstance(reference, Family) or isinstance(prediction, Family):
            return self._families(reference, prediction)
        if isinstance(reference, Assignment) or isinstance(prediction, Assignment):
            return self._assignments(reference, prediction)
        if isinstance(reference, Membership) or isinstance(prediction, Membership):
            return self._memberships(reference, prediction)
        if isinstance(reference, Sequence_) or isinstance(prediction, Sequence_):
            return self._sequences(reference, prediction)
        if is_set(reference) or is_set(prediction):
            return same_set(reference, prediction, self._budget)
        if isinstance(reference, Quantity) and isinstance(prediction, Quantity):
            return self._quantities(reference, prediction)
        return same_notation(reference, prediction, self._budget, self.equal)

    # equations and names

    def _equations(self, reference: Answer, prediction: Answer, equation: Relation) -> bool:
        """An equation without a name: the same equation, or a true chain and its value."""
        other = reference if equation is prediction else prediction
        if isinstance(other, Relation):
            return _is_equation(other) and self._same_equation(other, equation)
        if (
            isinstance(other, Assignment)
            and isinstance(other.value, Quantity)
            and (other.name_node is not None)
        ):
            as_relation = Relation((other.name_node, other.value.node), ("=",))
            if self._same_equation(as_relation, equation):
                return True
        if not self._is_true_chain(equation):
            return False
        value = Quantity(equation.sides[0])
        if equation is reference:
            return self.equal(value, prediction)
        return self.equal(reference, value)

    def _same_equation(self, left: Relation, right: Relation) -> bool:
        if len(left.sides) != 2 or len(right.sides) != 2:
            return len(left.sides) == len(right.sides) and all(
                equality.equal(a, b, self._budget)
                for a, b in zip(left.sides, right.sides, strict=True)
            )
        return equality.proportional(
            subtract(*left.sides), subtract(*right.sides), self._budget, positive=False
        )

    def _is_true_chain(self, chain: Relation) -> bool:
        r"""Whether all sides are equal, and what follows \\approx rounds the first side."""
        for (left, right), relation in zip(pairwise(chain.sides), chain.relations, strict=True):
            if equality.equal(left, right, self._budget):
                continue
            if relation != "~" or not is_rounding(right, chain.sides[0], self._budget):
                return False
        return True

    def _assignments(self, reference: Answer, prediction: Answer) -> bool:
        for a, b in ((reference, prediction), (prediction, reference)):
            if isinstance(a, Assignment) and isinstance(b, Sequence_) and len(names_in(b)) > 1:
                items = spread(a)
                return items is not None and self._two_sequences(items, b)
        if not isinstance(reference, Assignment):
            assert isinstance(prediction, Assignment)
            return (
                prediction.is_label
                and not is_inequality(reference)
                and not equates_choices(prediction)
                and self.equal(reference, prediction.value)
            )
        if not isinstance(prediction, Assignment):
            return not is_inequality(prediction) and self.equal(reference.value, prediction)
        if reference.name == prediction.name:
            return self.equal(reference.value, prediction.value)
        if (value := with_same_arguments(reference, prediction)) is not None:
            return self.equal(reference.value, value)
        sides = [as_equation(answer) for answer in (reference, prediction)]
        if sides[0] is None or sides[1] is None:
            return False
        return equality.proportional(sides[0], sides[1], self._budget, positive=False)

    def _families(self, reference: Answer, prediction: Answer) -> bool:
        """The name of a parameter does not matter, and its domain may be left out."""
        bare = [without_real_domain(answer) for answer in (reference, prediction)]
        if bare != [reference, prediction]:
            has_other = any(isinstance(answer, Family) for answer in bare)
            is_real = all(isinstance(answer, Family) for answer in (reference, prediction))
            return not (has_other and is_real) and self.equal(*bare)
        if isinstance(reference, Family) and isinstance(prediction, Family):
            answer = renamed(prediction.answer, prediction.parameter, reference.parameter)
            return reference.domain == prediction.domain and self.equal(reference.answer, answer)
        family = reference if isinstance(reference, Family) else prediction
        assert isinstance(family, Family)
        if describes(family.answer, family.parameter):
            return False  # without its domain, x > 1 is another set
        if isinstance(reference, Family):
            return self.equal(reference.answer, prediction)
        return self.equal(reference, family.answer)

    def _memberships(self, reference: Answer, prediction: Answer) -> bool:
        if isinstance(reference, Membership) and isinstance(prediction, Membership):
            return (
                reference.name == prediction.name
                and reference.is_member == prediction.is_member
                and self.equal(reference.container, prediction.container)
            )
        if isinstance(reference, Membership):
            return reference.is_member and self.equal(reference.container, prediction)
        assert isinstance(prediction, Membership)
        return prediction.is_member and self.equal(reference, prediction.container)

    # sequences

    def _sequences(self, reference: Answer, prediction: Answer) -> bool:
        if isinstance(reference, Sequence_) and isinstance(prediction, Sequence_):
            return self._two_sequences(reference, prediction)
        if isinstance(reference, Sequence_):
            return self._sequence_and_other(reference, prediction, is_reference=True)
        assert isinstance(prediction, Sequence_)
        return self._sequence_and_other(prediction, reference, is_reference=False)

    def _two_sequences(self, reference: Sequence_, prediction: Sequence_) -> bool:
        reference, prediction = self._expanded(reference), self._expanded(prediction)
        if not may_mean_the_same(reference, prediction):
            return False
        for a, b in ((reference, prediction), (prediction, reference)):
            inner = a.items[0] if a.order is Order.SET and len(a.items) == 1 else None
            if isinstance(inner, Sequence_) and inner.order is not Order.SET:
                return self.equal(inner, b)
        if (
            is_set(reference)
            and is_set(prediction)
            and not all(isinstance(item, Quantity) for item in reference.items + prediction.items)
            and same_set(reference, prediction, self._budget)
        ):
            return True
        if _has_relations(reference) or _has_relations(prediction):
            return same_set(reference, prediction, self._budget)
        if reference.order is Order.TUPLE or prediction.order is Order.TUPLE:
            if Order.SET in (reference.order, prediction.order):
                return False
            return self._in_order(reference.items, prediction.items)
        names = [names_in(sequence) for sequence in (reference, prediction)]
        if max(map(len, names)) > 1 and not (names[0] and names[1]):
            return self._in_order(reference.items, prediction.items)
        if {reference.order, prediction.order} == {Order.LIST} and len(reference.items) != len(
            prediction.items
        ):
            return False  # 1, 2, 1 says more than 1, 2
        return self._in_any_order(reference.items, prediction.items)

    def _in_order(self, left: Sequence[Answer], right: Sequence[Answer]) -> bool:
        """Element by element; the prediction's values stand in the order of their names."""
        if len(left) != len(right):
            return False
        named = [all(isinstance(item, Assignment) for item in side) for side in (left, right)]
        if named[0] and not named[1]:
            left = sorted(left, key=name_in) if {*map(name_in, left)} <= _COORDINATES else left
        elif named[1] and not named[0]:
            right = sorted(right, key=name_in)
        return all(self._same_element(a, b) for a, b in zip(left, right, strict=True))

    def _same_element(self, left: Answer, right: Answer) -> bool:
        """Equality inside a sequence, where {1} is not 1."""
        are_sets = [isinstance(x, Sequence_) and x.order is Order.SET for x in (left, right)]
        return are_sets[0] is are_sets[1] and self.equal(left, right)

    def _in_any_order(self, left: Sequence[Answer], right: Sequence[Answer]) -> bool:
        """Each element of one has an equal in the other, both ways."""
        glances: list[list[Glance | None]] = [[], []]
        if len(left) * len(right) >= _MANY_PAIRS:
            glances = [[glance_at(item, self._budget) for item in side] for side in (left, right)]

        def are_same(i: int, j: int) -> bool:
            first, second = (glances[0][i], glances[1][j]) if glances[0] else (None, None)
            if first is not None and second is not None and first.differs_from(second):
                return False
            return self._same_element(left[i], right[j])

        unmatched = set(range(len(right)))
        for i in range(len(left)):
            matches = {j for j in unmatched if are_same(i, j)}
            if not matches and not any(
                j not in unmatched and are_same(i, j) for j in range(len(right))
            ):
                return False
            unmatched -= matches
        return not unmatched

    def _expanded(self, sequence: Sequence_) -> Sequence_:
        """The sequence with a plus-minus element replaced by its values."""
        items: list[Answer] = []
        for item in sequence.items:
            expanded = expand_signs(item)
            items.extend(expanded if expanded is not None else (item,))
        return replace(sequence, items=tuple(items))

    def _sequence_and_other(
        self, sequence: Sequence_, other: Answer, *, is_reference: bool
    ) -> bool:
        """`is_reference`: whether the sequence is, and the other answer the prediction."""

        def in_order(items: Sequence[Answer], others: Sequence[Answer]) -> bool:
            return self._in_order(items, others) if is_reference else self._in_order(others, items)

        def as_sequences(other: Sequence_) -> bool:
            sides = (sequence, other) if is_reference else (other, sequence)
            return self._two_sequences(*sides)

        if (expanded := expand_signs(other)) is not None:
            return sequence.order is not Order.TUPLE and as_sequences(
                Sequence_(Order.SET, expanded)
            )
        if isinstance(other, Interval) and sequence.order is Order.TUPLE:
            is_open = not (other.has_low or other.has_high)
            ends = (Quantity(other.low), Quantity(other.high))
            return is_open and in_order(sequence.items, ends)
        if is_set(other) and (
            is_set(sequence) or sequence.order is Order.TUPLE or are_intervals(sequence)
        ):
            return same_set(sequence, other, self._budget)
        if _is_point(other):
            return as_sequences(Sequence_(Order.TUPLE, tuple(map(Quantity, other.node.args))))
        if isinstance(other, Quantity) and (vector := _vector(other.node)) is not None:
            return sequence.order is Order.TUPLE and in_order(sequence.items, vector)
        if sequence.order is Order.SET and len(sequence.items) == 1:
            inner = sequence.items[0]
            if isinstance(inner, Sequence_):
                return False
            return self.equal(inner, other) if is_reference else self.equal(other, inner)
        return False

    # numbers

    def _quantities(self, reference: Quantity, prediction: Quantity) -> bool:
        signs = [expand_signs(answer) for answer in (reference, prediction)]
        if signs[0] is not None and signs[1] is not None:
            return self._in_any_order(signs[0], signs[1])
        if signs[0] is not None or signs[1] is not None:
            return False
        node = with_same_parameter(reference.node, prediction.node)
        return quantities_equal(reference, replace(prediction, node=node), self._budget)


def is_inequality(answer: Answer) -> bool:
    """Whether the answer is a relation that is not an equation."""
    if isinstance(answer, Conditions):
        return True
    return isinstance(answer, Relation) and not _is_equation(answer)


def _is_equation(relation: Relation) -> bool:
    return set(relation.relations) <= _EQUATIONS


def _has_relations(sequence: Sequence_) -> bool:
    return bool(sequence.items) and all(isinstance(item, Relation) for item in sequence.items)


def _is_point(answer: Answer) -> TypeGuard[Quantity]:
    """Whether the answer was read as a binomial but could be the point C(1, 2)."""
    return (
        isinstance(answer, Quantity)
        and answer.node.op is Op.CALL
        and answer.node.name == "binom"
        and len(answer.node.args) == 2
    )


def _vector(node: Node) -> tuple[Answer, ...] | None:
    """The entries of a row or a column, or None for any other node."""
    if node.op is not Op.MATRIX:
        return None
    if len(node.args) == 1:
        return tuple(Quantity(cell) for cell in node.args[0].args)
    if all(len(row.args) == 1 for row in node.args):
        return tuple(Quantity(row.args[0]) for row in node.args)
    return None
