"""A first glance at the elements of a list: what differs at one point needs no comparison.

A list of n elements in another order would cost n^2 comparisons; most of them end here.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from random import Random

from . import policy
from .answers import Answer, Assignment, Quantity
from .evaluate import Evaluator
from .matrices import Matrix
from .nodes import Node, Op, symbols
from .numeric import NumericField, WorkBudget
from .result import Undefined

_AMBIGUOUS = frozenset((Op.PERCENT, Op.DEGREE, Op.PLUS_MINUS, Op.MATRIX, Op.TRANSPOSE))
_LARGEST_INTEGER = 9
_NOISE_BITS = policy.PRECISION_BITS // 2
_CLOSE = 1e-6
_MAX_FLOAT_BITS = 1000


@dataclass(frozen=True)
class Glance:
    """The value of an element where all its symbols are small whole numbers."""

    name: str
    """What it is assigned to, or ""."""
    symbols: frozenset[str]
    value: float
    noise: float

    def differs_from(self, other: Glance) -> bool:
        """Whether the two elements are certainly different."""
        if self.name != other.name or self.symbols != other.symbols:
            return False
        close = _CLOSE * max(abs(self.value), abs(other.value))
        return abs(self.value - other.value) > max(close, self.noise, other.noise)


def glance_at(answer: Answer, budget: WorkBudget) -> Glance | None:
    """The glance, or None where the notation leaves a choice or there is no real value."""
    name = ""
    if isinstance(answer, Assignment):
        name, answer = answer.name, answer.value
    if not isinstance(answer, Quantity) or answer.unit or _is_ambiguous(answer.node):
        return None
    names = symbols(answer.node)
    values = {symbol: _small_integer(symbol) for symbol in names}
    field = NumericField(policy.PRECISION_BITS, values, budget, is_real=True)
    try:
        value = Evaluator(field).value(answer.node)
    except Undefined:
        return None
    if isinstance(value, Matrix) or value.imag or field.largest_bits > _MAX_FLOAT_BITS:
        return None
    return Glance(name, names, float(value.real), 2.0 ** (field.largest_bits - _NOISE_BITS))


def _is_ambiguous(node: Node) -> bool:
    return any(
        part.op in _AMBIGUOUS
        or (part.op is Op.CALL and part.name == "log")
        or (part.op is Op.CONSTANT and part.name in ("i", "infinity"))
        for part in node.walk()
    )


def _small_integer(symbol: str) -> Fraction:
    return Fraction(Random(f"{symbol} glance").randint(3, _LARGEST_INTEGER))
