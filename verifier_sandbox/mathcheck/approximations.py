r"""Decimals that stand for an exact value: long ones, and those after \approx."""

from __future__ import annotations

from fractions import Fraction

from . import policy
from .facts import facts_of
from .nodes import Literal, Node, Op, symbols
from .numeric import WorkBudget, magnitude
from .result import Undefined
from .values import value_of

_BITS_PER_DIGIT = 4
_MIN_DECIMALS_TO_CUT = 2


def stands_for(decimal: Node, exact: Node, budget: WorkBudget) -> bool:
    """Whether a decimal of many digits is an infinite one, rounded or cut in its last digit."""
    literal = signed_literal(decimal)[1]
    if literal is None or literal.num_decimals is None or symbols(exact):
        return False
    if literal.num_significant < policy.EXACT_DECIMAL_DIGITS or _is_decimal(exact):
        return False
    value = facts_of(exact, budget).exact
    if isinstance(value, Fraction) and _is_finite_decimal(value):
        return False  # it could have been written in full
    return is_rounding(decimal, exact, budget)


def is_rounding(approximation: Node, exact: Node, budget: WorkBudget) -> bool:
    """Whether the literal is the exact value rounded to its digits (or cut to two or more)."""
    sign, literal = signed_literal(approximation)
    if literal is None or literal.num_significant > policy.MAX_ROUNDED_DIGITS or symbols(exact):
        return False
    # The error is 2^(size of the value - precision): both parts of a mixed one must be seen.
    precision_bits = policy.PRECISION_BITS + _BITS_PER_DIGIT * literal.num_significant
    try:
        value = value_of(exact, budget, precision_bits=precision_bits)
        if value and abs(magnitude(value)) > _BITS_PER_DIGIT * policy.MAX_ROUNDED_DIGITS:
            return False
    except Undefined:
        return False
    num_decimals = literal.num_decimals or 0
    scaled = sign * value * literal.value.denominator - literal.value.numerator
    missing = scaled * 10**num_decimals / literal.value.denominator  # in units of the last digit
    if abs(missing) <= 0.5:
        return True
    return num_decimals >= _MIN_DECIMALS_TO_CUT and 0 <= missing < 1


def signed_literal(node: Node) -> tuple[int, Literal | None]:
    """The sign before a literal, and the literal; None for any other expression."""
    if node.op is Op.NEGATE:
        return -1, node.args[0].literal
    return 1, node.literal


def _is_decimal(node: Node) -> bool:
    literal = signed_literal(node)[1]
    return literal is not None and literal.num_decimals is not None


def _is_finite_decimal(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1
