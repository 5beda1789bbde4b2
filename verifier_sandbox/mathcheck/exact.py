"""Exact rational arithmetic under a bound on the size of numbers.

Settles what rounding cannot: 2^{100} against its digits, 1/2004! against 1/2006!, 10^{100}+1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from . import policy
from .nodes import Literal
from .result import TooBig, Undefined

_BITS_PER_OPERATION = 300  # so that many operations on small numbers are bounded too


class NotExact(Exception):
    """The expression is not a rational number that this arithmetic can compute."""


class ExactField:
    """Rational numbers. Sizes are checked before a result is computed, not after."""

    def __init__(self) -> None:
        self._work_bits = 0

    def number(self, literal: Literal) -> Fraction:
        return self._charged(literal.value)

    def constant(self, name: str) -> Fraction:
        raise NotExact(name)

    def symbol(self, name: str) -> Fraction:
        raise NotExact(name)

    def apply(self, name: str, args: Sequence[Fraction]) -> Fraction:
        raise NotExact(name)

    def integer(self, value: int) -> Fraction:
        return Fraction(value)

    def as_integer(self, value: Fraction) -> int:
        if value.denominator != 1:
            raise Undefined("an integer is needed")
        return value.numerator

    def add(self, left: Fraction, right: Fraction) -> Fraction:
        if left.denominator > 1 and right.denominator > 1:  # takes two common divisors
            self._work_bits += _bits(left)
        return self._charged(left + right)

    def multiply(self, left: Fraction, right: Fraction) -> Fraction:
        _check_bits(_bits(left) + _bits(right))
        return self._charged(left * right)

    def negate(self, value: Fraction) -> Fraction:
        return -value

    def invert(self, value: Fraction) -> Fraction:
        if not value:
            raise Undefined("division by zero")
        return 1 / value

    def degrees(self, value: Fraction) -> Fraction:
        return value

    def power(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1:
            return self._rational_power(base, exponent)
        if not base and exponent <= 0:
            raise Undefined("zero to a power that is not positive")
        if base in (0, 1):
            return base
        if base == -1:
            return Fraction(-1 if exponent.numerator % 2 else 1)
        _check_bits(_bits(base) * abs(exponent.numerator))
        return self._charged(base**exponent.numerator)

    def root(self, radicand: Fraction, index: Fraction) -> Fraction:
        if index.denominator != 1 or not 2 <= index.numerator <= 64:
            raise NotExact("root")
        sign = -1 if radicand < 0 else 1
        if sign < 0 and index.numerator % 2 == 0:
            raise NotExact("an even root of a negative number")
        parts = (abs(radicand.numerator), radicand.denominator)
        if max(parts).bit_length() > 4096:
            raise NotExact("root of a long number")
        above, below = (_exact_root(part, index.numerator) for part in parts)
        return Fraction(sign * above, below)

    def _rational_power(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator > 64 or (base < 0 and exponent.denominator % 2 == 0):
            raise NotExact("power")
        return self.power(
            self.root(base, Fraction(exponent.denominator)), Fraction(exponent.numerator)
        )

    def call(self, name: str, args: Sequence[Fraction]) -> Fraction:
        function = _FUNCTIONS.get(name)
        if function is None:
            raise NotExact(name)
        return self._charged(function(*args))

    def _charged(self, value: Fraction) -> Fraction:
        bits = _bits(value)
        _check_bits(bits)
        self._work_bits += bits + _BITS_PER_OPERATION
        if self._work_bits > policy.MAX_EXACT_WORK_BITS:
            raise TooBig("too much exact arithmetic")
        return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _check_bits(bits: int) -> None:
    if bits > policy.MAX_EXACT_BITS:
        raise TooBig(f"an exact number of more than {policy.MAX_EXACT_BITS} bits")


def _exact_root(value: int, index: int) -> int:
    """The integer root of a perfect power. Raises NotExact for any other number."""
    if value < 2:
        return value
    root = 1 << -(-value.bit_length() // index)
    while True:  # Newton's method from above
        smaller = ((index - 1) * root + value // root ** (index - 1)) // index
        if smaller >= root:
            break
        root = smaller
    if root**index != value:
        raise NotExact("irrational root")
    return root


def _integer(value: Fraction) -> int:
    if value.denominator != 1:
        raise NotExact("not an integer")
    return value.numerator


def _factorial(value: Fraction) -> Fraction:
    n = _integer(value)
    if n < 0:
        raise Undefined("factorial of a negative number")
    if n > policy.MAX_EXACT_FACTORIAL:
        raise TooBig(f"a factorial above {policy.MAX_EXACT_FACTORIAL}")
    return Fraction(math.factorial(n))


def _double_factorial(value: Fraction) -> Fraction:
    n = _integer(value)
    if n > 1000:
        raise TooBig("a double factorial above 1000")
    return Fraction(math.prod(range(n, 0, -2)))


def _binomial(above: Fraction, below: Fraction) -> Fraction:
    n, k = _integer(above), _integer(below)
    if n < 0 or k < 0:
        raise NotExact("binomial of a negative number")
    if n > policy.MAX_EXACT_FACTORIAL and min(k, n - k) > 64:
        raise TooBig(f"a binomial above {policy.MAX_EXACT_FACTORIAL}")
    _check_bits(n.bit_length())
    return Fraction(math.comb(n, k))


def _permutations(above: Fraction, below: Fraction) -> Fraction:
    n, k = _integer(above), _integer(below)
    if n < 0 or k < 0:
        raise Undefined("permutations of a negative number")
    if n > policy.MAX_EXACT_FACTORIAL:
        raise TooBig(f"permutations above {policy.MAX_EXACT_FACTORIAL}")
    return Fraction(math.perm(n, k))


def _modulo(value: Fraction, modulus: Fraction) -> Fraction:
    if not modulus:
        raise Undefined("modulo zero")
    return value % modulus


_FUNCTIONS: dict[str, Callable[..., Fraction]] = {
    "abs": lambda value: abs(value),
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
    "sgn": lambda value: Fraction((value > 0) - (value < 0)),
    "factorial": _factorial,
    "double_factorial": _double_factorial,
    "binom": _binomial,
    "permutations": _permutations,
    "mod": _modulo,
    "gcd": lambda *values: Fraction(math.gcd(*map(_integer, values))),
    "lcm": lambda *values: Fraction(math.lcm(*map(_integer, values))),
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
    "Re": lambda value: value,
    "Im": lambda value: Fraction(0),
}
