"""Compare answers with a notation of their own: bases, times, congruences, dates, phrases."""

from __future__ import annotations

from collections.abc import Callable

from . import equality
from .answers import Answer, Based, Clock, Congruence, Date, Phrase, Quantity, Ratio
from .nodes import call, number, subtract
from .numeric import WorkBudget
from .ratios import same_ratio


def same_notation(
    reference: Answer,
    prediction: Answer,
    budget: WorkBudget,
    equal: Callable[[Answer, Answer], bool],
) -> bool:
    """Whether two such answers agree. `equal` compares the mathematics inside a phrase."""
    for a, b in ((reference, prediction), (prediction, reference)):
        if isinstance(a, Based):
            return _same_digits(a, b)
    if isinstance(reference, Clock | Ratio) or isinstance(prediction, Clock | Ratio):
        return same_ratio(reference, prediction, budget)
    if isinstance(reference, Congruence) and isinstance(prediction, Congruence):
        return _same_residue(reference, prediction, budget)
    for a, b in ((reference, prediction), (prediction, reference)):
        if isinstance(a, Congruence) and isinstance(b, Quantity):
            return equality.equal(a.value, b.node, budget)
    if isinstance(reference, Date) and isinstance(prediction, Date):
        same_day = (reference.month, reference.day) == (prediction.month, prediction.day)
        return same_day and (
            reference.year == prediction.year or not prediction.year or not reference.year
        )
    if isinstance(reference, Phrase) and isinstance(prediction, Phrase):
        return _same_parts(reference, prediction, equal)
    return False


def _same_digits(based: Based, other: Answer) -> bool:
    """The same value in any base, or the same digits where one side names no base."""
    if isinstance(other, Based):
        return based.value is not None and based.value == other.value
    if not isinstance(other, Quantity) or other.node.literal is None:
        return False
    return other.node.literal.text.lstrip("0") == based.digits.lstrip("0")


def _same_residue(reference: Congruence, prediction: Congruence, budget: WorkBudget) -> bool:
    if reference.name != prediction.name or not equality.equal(
        reference.modulus, prediction.modulus, budget
    ):
        return False
    difference = subtract(reference.value, prediction.value)
    return equality.equal(call("mod", difference, reference.modulus), number(0), budget)


def _same_parts(
    reference: Phrase, prediction: Phrase, equal: Callable[[Answer, Answer], bool]
) -> bool:
    if len(reference.parts) != len(prediction.parts):
        return False
    for a, b in zip(reference.parts, prediction.parts, strict=True):
        if isinstance(a, str) or isinstance(b, str):
            if a != b:
                return False
        elif not equal(a, b):
            return False
    return True
