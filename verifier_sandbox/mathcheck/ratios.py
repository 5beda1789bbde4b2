"""Ratios and times of day: both are written with a colon."""

from __future__ import annotations

from math import gcd

from . import equality
from .answers import Answer, Clock, Quantity, Ratio
from .nodes import Node, Op, contains, number
from .numeric import WorkBudget

_HALF_DAY_S = 12 * 3600


def same_ratio(reference: Answer, prediction: Answer, budget: WorkBudget) -> bool:
    """Times of day, or ratios; a text that could be both is a ratio only if it is reduced."""
    clocks = (_clock(reference), _clock(prediction))
    if clocks[0] is not None and clocks[1] is not None and _same_time(clocks[0], clocks[1]):
        return True
    if not isinstance(reference, Ratio) and not isinstance(prediction, Ratio):
        return False
    if isinstance(reference, Ratio) and not _is_surely_ratio(reference):
        return False
    if not isinstance(reference, Ratio) and not _is_surely_ratio(prediction):
        return False  # 15:30 is no way to write 0.5
    if isinstance(reference, Quantity) and reference.node.literal is not None:
        assert isinstance(prediction, Ratio)
        if prediction.is_spelled:
            return False  # nor is "5 to 1" one to write 5
    terms = [_terms(answer) for answer in (reference, prediction)]
    if terms[0] is None or terms[1] is None or len(terms[0]) != len(terms[1]):
        return False
    first = [term[0] for term in terms if term is not None]
    return all(
        equality.equal(_times(a, first[1]), _times(b, first[0]), budget)
        and not equality.equal(a, number(0), budget)
        for a, b in zip(terms[0], terms[1], strict=True)
    )


def _same_time(left: Clock, right: Clock) -> bool:
    """Whether two times agree; where one says no half of the day, 3:30 is 15:30 too."""
    if (left.half and right.half) or (not left.half and not right.half):
        return left.seconds == right.seconds
    with_half, without = (left, right) if left.half else (right, left)
    if without.seconds > _HALF_DAY_S:  # a 24-hour time
        return with_half.seconds == without.seconds
    return with_half.seconds % _HALF_DAY_S == without.seconds % _HALF_DAY_S


def _clock(answer: Answer) -> Clock | None:
    if isinstance(answer, Ratio):
        return answer.clock
    return answer if isinstance(answer, Clock) else None


def _terms(answer: Answer) -> tuple[Node, ...] | None:
    if isinstance(answer, Ratio):
        return answer.terms
    if isinstance(answer, Quantity) and not contains(answer.node, Op.PERCENT):
        return (answer.node, number(1))
    return None


def _is_surely_ratio(answer: Answer) -> bool:
    """Whether it cannot be a time of day, or is reduced, as ratios are and times need not be."""
    return isinstance(answer, Ratio) and (answer.clock is None or _is_reduced(answer))


def _is_reduced(ratio: Ratio) -> bool:
    if any(term.literal is not None and term.literal.text.startswith("0") for term in ratio.terms):
        return False
    values = [term.literal.value.numerator for term in ratio.terms if term.literal is not None]
    return gcd(*values) == 1 and 0 not in values


def _times(left: Node, right: Node) -> Node:
    return Node(Op.MULTIPLY, (left, right))
