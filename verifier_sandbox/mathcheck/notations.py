"""Compare answers with a notation of their own: bases, times, congruences, dates, phrases."""

from __future__ import annotations

from collections.abc import Callable

from . import equality
from .answers import Answer, Based, Clock, Congruence, Date, Phrase, Quantity, Ratio, Words
from .nodes import Op, call, number, subtract
from .numeric import WorkBudget
from .quantities import is_residue
from .ratios import same_ratio


def same_notation(
    reference: Answer,
    prediction: Answer,
    budget: WorkBudget,
    equal: Callable[[Answer, Answer], bool],
) -> bool:
    """Whether two such answers agree. `equal` compares the mathematics inside a phrase."""
    if isinstance(reference, Based) or isinstance(prediction, Based):
        return _same_digits(reference, prediction)
    if isinstance(reference, Clock | Ratio) or isinstance(prediction, Clock | Ratio):
        return same_ratio(reference, prediction, budget)
    if isinstance(reference, Congruence) and isinstance(prediction, Congruence):
        return _same_residue(reference, prediction, budget)
    for a, b in ((reference, prediction), (prediction, reference)):
        if isinstance(a, Congruence) and isinstance(b, Quantity):
            if is_residue(b.node):
                return _same_residue(a, Congruence(b.node.args[0], b.node.args[1], a.name), budget)
            return equality.equal(a.value, b.node, budget)
    if isinstance(reference, Date) and isinstance(prediction, Date):
        same_day = (reference.month, reference.day) == (prediction.month, prediction.day)
        return same_day and (
            reference.year == prediction.year or not prediction.year or not reference.year
        )
    if isinstance(reference, Phrase) and isinstance(prediction, Phrase):
        return _same_parts(reference, prediction, equal)
    return False


def _same_digits(reference: Answer, prediction: Answer) -> bool:
    """The same value in any base, or the same digits where the prediction names no base."""
    if isinstance(reference, Based) and isinstance(prediction, Based):
        return reference.value is not None and reference.value == prediction.value
    if isinstance(reference, Based):
        return _digits(prediction) == reference.digits.lstrip("0")
    assert isinstance(prediction, Based)
    return prediction.base == 10 and _digits(reference) == prediction.digits.lstrip("0")


def _digits(answer: Answer) -> str | None:
    """The digits of a number without a base, also of 2A, which reads as a product."""
    if isinstance(answer, Words):
        return answer.text.upper().lstrip("0")
    if not isinstance(answer, Quantity) or answer.unit:
        return None
    is_product = answer.node.op is Op.MULTIPLY
    digits = ""
    for factor in answer.node.args if is_product else (answer.node,):
        if factor.literal is None and factor.op is not Op.SYMBOL:
            return None
        digits += factor.name if factor.literal is None else factor.literal.text
    return digits.lstrip("0")


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
