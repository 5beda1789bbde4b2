r"""Functions with steps and corners, which may differ from another only where no sample point lies.

Where one side has such a function of its symbols and the other has nothing of the kind, no number
of sample points proves them equal: \min(x, 10^{12}) and n! + \lfloor 1/n \rfloor are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from .evaluate import Evaluator
from .exact import ExactField, NotExact
from .name_tables import name_set
from .nodes import Node, Op, symbols
from .result import TooBig, Undefined

_CLIPPING = name_set("min max")
_CORNERS = _CLIPPING | name_set("abs sgn")
_STEPS = name_set("floor ceil mod sgn")
_MAX_CONSTANTS = 3


def has_unmatched_step(left: frozenset[str], right: frozenset[str]) -> bool:
    """Whether only one of the sides with these `step_kinds` clips or rounds its symbols."""
    return any(
        ("clips" in a and "corner" not in b) or ("steps" in a and "alternates" not in b)
        for a, b in ((left, right), (right, left))
    )


def alternates(node: Node) -> bool:
    r"""Whether it has \lfloor x \rfloor, (-1)^n or the like: whole numbers are special to it."""
    return "alternates" in step_kinds(node)


def clipping_constants(node: Node) -> tuple[Fraction, ...]:
    """The numbers that a minimum or maximum in the expression is taken with."""
    found: dict[Fraction, None] = {}
    for part in node.walk():
        if part.op is Op.CALL and part.name in _CLIPPING:
            values = (_constant(arg) for arg in part.args)
            found |= {abs(value): None for value in values if value}
    return tuple(found)[:_MAX_CONSTANTS]


def step_kinds(node: Node) -> frozenset[str]:
    """What steps and corners the expression has: "clips", "corner", "steps", "alternates"."""
    return frozenset(kind for part in node.walk() for kind in _kinds_of(part))


def _kinds_of(part: Node) -> Iterator[str]:
    if part.op is Op.POWER and symbols(part.args[1]):
        base = _constant(part.args[0])
        if base == 0:
            yield "steps"
        if base is not None and base <= 0:
            yield "alternates"
    elif part.op is Op.CALL and part.name in _CORNERS | _STEPS and symbols(part):
        if part.name in _CLIPPING:
            yield "clips"
        if part.name in _CORNERS:
            yield "corner"
        if part.name in _STEPS:
            yield from ("steps", "alternates")


def _constant(node: Node) -> Fraction | None:
    """The exact value of a part without symbols, or None."""
    if node.literal is not None:
        return node.literal.value
    if symbols(node):
        return None
    try:
        value = Evaluator(ExactField()).value(node)
    except (NotExact, Undefined, TooBig):
        return None
    return value if isinstance(value, Fraction) else None
