"""Rational numbers too long to write down, compared by their residues modulo two primes.

Different residues prove two numbers different. Equal ones mean equal: the primes have 255 and 256
bits, and exponents above 64 bits are refused, so no one can aim at a coincidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .evaluate import Evaluator
from .exact import ExactField, NotExact
from .nodes import Literal, Node
from .result import TooBig, Undefined

_PRIMES = (2**255 - 19, 2**256 - 2**32 - 977)
_MAX_EXPONENT_BITS = 64
_MAX_EXACT_BITS = 512


def equal_residues(left: Node, right: Node) -> bool:
    """Whether two rational expressions are equal. Raises NotExact, Undefined or TooBig."""
    for prime in _PRIMES:
        field = _ResidueField(prime)
        values = [Evaluator(field).value(node) for node in (left, right)]
        if not all(isinstance(value, _Residue) for value in values):
            raise TooBig("long numbers in a matrix")
        if values[0].residue != values[1].residue:
            return False
    return True


@dataclass(frozen=True)
class _Residue:
    """A number modulo the prime, and the number itself while it is short."""

    residue: int
    exact: Fraction | None


class _ResidueField:
    def __init__(self, prime: int) -> None:
        self._prime = prime
        self._exactly = ExactField()  # also bounds how many operations there are

    def number(self, literal: Literal) -> _Residue:
        return self._from_exact(literal.value)

    def integer(self, value: int) -> _Residue:
        return self._from_exact(Fraction(value))

    def constant(self, name: str) -> _Residue:
        raise NotExact(name)

    symbol = constant

    def apply(self, name: str, args: Sequence[_Residue]) -> _Residue:
        raise NotExact(name)

    def degrees(self, value: _Residue) -> _Residue:
        return value

    def as_integer(self, value: _Residue) -> int:
        return self._exactly.as_integer(self._short(value))

    def add(self, left: _Residue, right: _Residue) -> _Residue:
        if left.exact is not None and right.exact is not None:
            return self._from_exact(self._exactly.add(left.exact, right.exact))
        return _Residue((left.residue + right.residue) % self._prime, None)

    def multiply(self, left: _Residue, right: _Residue) -> _Residue:
        if left.exact is not None and right.exact is not None:
            return self._from_exact(self._exactly.multiply(left.exact, right.exact))
        return _Residue(left.residue * right.residue % self._prime, None)

    def negate(self, value: _Residue) -> _Residue:
        return _Residue(-value.residue % self._prime, None if value.exact is None else -value.exact)

    def invert(self, value: _Residue) -> _Residue:
        if value.exact is not None:
            return self._from_exact(self._exactly.invert(value.exact))
        return _Residue(self._inverse(value.residue), None)

    def power(self, base: _Residue, exponent: _Residue) -> _Residue:
        power = self._short(exponent)
        if power.denominator != 1:
            raise NotExact("a power that is not an integer")
        if power.numerator.bit_length() > _MAX_EXPONENT_BITS:
            raise TooBig("an exponent out of range")
        if base.exact is not None:
            if base.exact.denominator.bit_length() + base.exact.numerator.bit_length() < 3:
                return self._from_exact(self._exactly.power(base.exact, power))  # 0, 1 and -1
            if abs(power.numerator) < _MAX_EXACT_BITS:
                return self._from_exact(self._exactly.power(base.exact, power))
        positive = pow(base.residue, abs(power.numerator), self._prime)
        return _Residue(self._inverse(positive) if power < 0 else positive, None)

    def root(self, radicand: _Residue, index: _Residue) -> _Residue:
        return self._from_exact(self._exactly.root(self._short(radicand), self._short(index)))

    def call(self, name: str, args: Sequence[_Residue]) -> _Residue:
        return self._from_exact(self._exactly.call(name, [self._short(arg) for arg in args]))

    def _from_exact(self, value: Fraction) -> _Residue:
        residue = value.numerator * self._inverse(value.denominator) % self._prime
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        return _Residue(residue, value if bits <= _MAX_EXACT_BITS else None)

    def _short(self, value: _Residue) -> Fraction:
        if value.exact is None:
            raise TooBig("a long number where its digits are needed")
        return value.exact

    def _inverse(self, residue: int) -> int:
        try:
            return pow(residue, -1, self._prime)
        except ValueError:
            raise Undefined("division by zero") from None
