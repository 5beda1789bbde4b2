"""What is known of one side of a comparison before any numeric value is computed."""

from __future__ import annotations

from enum import Enum
from fractions import Fraction
from functools import cached_property
from typing import Any, cast

from .evaluate import Evaluator
from .exact import ExactField, NotExact
from .modular import equal_residues
from .nodes import Node, Op, symbols
from .numeric import WorkBudget
from .result import TooBig, Undefined
from .steps import step_kinds

_SHORT_BITS = 24  # of a number in an ordinary expression
_SEEN_BITS = 200  # of the numbers in a constant, what its first precision is enough for


class _Exactness(Enum):
    """Why an expression has no exact rational value."""

    NOT_RATIONAL = "not rational"
    UNDEFINED = "undefined"
    TOO_BIG = "too big"


class Facts:
    """What a comparison asks about one side; computed once, because lists compare all pairs."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.names = symbols(node)
        self.plain = plain_number(node)
        self.infinity = _infinity(node)
        self.has_degrees = self.has_log = self.has_i = False
        self.number_bits = self._long_number_bits = 0
        for part in node.walk():
            if part.op is Op.DEGREE:
                self.has_degrees = True
            elif part.op is Op.CALL:
                self.has_log |= part.name == "log"
            elif part.op is Op.CONSTANT:
                self.has_i |= part.name == "i"
            elif part.literal is not None:
                bits = _size_bits(part.literal.value)
                self.number_bits += bits
                self._long_number_bits += bits if bits > _SHORT_BITS else 0

    @cached_property
    def exact(self) -> Any:
        """The exact value, or the reason why there is none."""
        try:
            return Evaluator(ExactField()).value(self.node)
        except NotExact:
            return _Exactness.NOT_RATIONAL
        except Undefined:
            return _Exactness.UNDEFINED
        except TooBig:
            return _Exactness.TOO_BIG

    @cached_property
    def step_kinds(self) -> frozenset[str]:
        """Its steps and corners (see `steps`)."""
        return step_kinds(self.node)

    @property
    def bits_below_one(self) -> int:
        """-log2 of the size of an exact value below one, else 0."""
        if self.names or not isinstance(self.exact, Fraction) or not self.exact:
            return 0
        size = self.exact.denominator.bit_length() - self.exact.numerator.bit_length()
        return max(0, size)

    @property
    def approximation_bits(self) -> int:
        r"""How close its numbers can come to a value that they are not, as -log2 of the distance.

        A fraction of n digits may agree with \\sqrt{2} to 2n digits.
        """
        if self.names:
            return 2 * self._long_number_bits
        bits = self.number_bits
        if isinstance(self.exact, Fraction):
            bits = max(bits, _size_bits(self.exact))
        return 2 * max(0, bits - _SEEN_BITS)


def facts_of(node: Node, budget: WorkBudget) -> Facts:
    """The facts, kept for the other comparisons of this check."""
    key = ("facts", id(node))
    if key not in budget.memo:
        budget.memo[key] = Facts(node)  # keeps the node alive, so its id stays its own
    return cast(Facts, budget.memo[key])


def exactly_equal(a: Facts, b: Facts) -> bool | None:
    """Exact comparison, or None if a side is not rational. Raises TooBig."""
    if a.exact is _Exactness.NOT_RATIONAL or b.exact is _Exactness.NOT_RATIONAL:
        return None
    if _Exactness.TOO_BIG in (a.exact, b.exact):
        try:
            return equal_residues(a.node, b.node)
        except NotExact:
            raise TooBig("a long number that has no residue") from None
        except Undefined:
            return False
    if _Exactness.UNDEFINED in (a.exact, b.exact):
        return False
    return bool(a.exact == b.exact)


def plain_number(node: Node) -> Fraction | None:
    """The value of a literal with or without a sign, or None for any other expression."""
    if node.op is Op.NEGATE and node.args[0].literal is not None:
        return -node.args[0].literal.value
    return node.literal.value if node.literal is not None else None


def _size_bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length() - 1


def _infinity(node: Node) -> int:
    """1 or -1 for plus or minus infinity, 0 for anything else."""
    if node.op is Op.NEGATE:
        return -_infinity(node.args[0])
    return int(node.op is Op.CONSTANT and node.name == "infinity")
