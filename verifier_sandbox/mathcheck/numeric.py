"""Arithmetic at high precision, at one point of the symbols, with every cost bounded.

Uses an mpmath context of its own for each thread, so neither the caller's precision nor another
thread's check is touched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from random import Random
from typing import Any

import mpmath
from mpmath.libmp import from_rational, round_nearest

from . import policy
from .exact import ExactField, NotExact
from .nodes import Literal
from .result import TooBig, Undefined

_MAX_MAGNITUDE_BITS = 1 << 40  # log2 of the largest value; mpmath's exponents are integers
_MAX_COMPLEX_MAGNITUDE_BITS = 1 << 15  # mpmath adds the squares of both parts exactly
_UNNOTICED_BITS = 8  # a smaller gap hides nothing below the guard bits of a comparison
_local = threading.local()


def context(precision_bits: int) -> Any:
    """This thread's mpmath context, set to the precision."""
    if not hasattr(_local, "context"):
        _local.context = mpmath.MPContext()
    _local.context.prec = precision_bits
    return _local.context


@dataclass(frozen=True)
class Gaussian:
    """A complex number with rational parts."""

    real: Fraction
    imaginary: Fraction


class WorkBudget:
    """Work that one check may still do. Raises TooBig when it is used up."""

    def __init__(self, units: int = policy.MAX_WORK) -> None:
        self.units = units
        self.memo: dict[Hashable, object] = {}
        """Values already computed in this check."""

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self.units < 0

    def spend(self, units: int) -> None:
        self.units -= units
        if self.units < 0:
            raise TooBig("too much numeric work")


class NumericField:
    """Real and complex numbers of `precision_bits`; `values` gives the symbols their values.

    With `is_real` a root or logarithm of a negative number is undefined instead of complex.

    `lost_bits` adds up how far below the leading bit the smaller part of a value was so far: the
    gap in size between two terms, or between 1 and cos 10^{-21}. A difference may be as small as
    twice that (the product of 1 + e and 1 - e). `largest_bits` is log2 of the largest value so
    far: rounding errors are about 2 ** (largest_bits - precision).
    """

    def __init__(
        self,
        precision_bits: int,
        values: Mapping[str, Any],
        budget: WorkBudget,
        *,
        decimal_log: bool = False,
        is_real: bool = False,
    ) -> None:
        self.mp = context(precision_bits)
        self.lost_bits = 0
        self.largest_bits = 0
        self._values = values
        self._budget = budget
        self._decimal_log = decimal_log
        self._is_real = is_real
        self._cost = 1 + precision_bits // 800

    def number(self, literal: Literal) -> Any:
        self._budget.spend(self._cost)
        return self._bounded(self._rational(literal.value))

    def integer(self, value: int) -> Any:
        return self.mp.mpf(value)

    def constant(self, name: str) -> Any:
        if name == "pi":
            return +self.mp.pi
        if name == "e":
            return +self.mp.e
        if name == "i":
            return self.mp.mpc(0, 1)
        raise Undefined("infinity in an expression")

    def symbol(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None:
            raise Undefined(f"{name} has no value")
        if isinstance(value, Fraction):
            return self._rational(value)
        if isinstance(value, Gaussian):
            return self.mp.mpc(self._rational(value.real), self._rational(value.imaginary))
        return value

    def _rational(self, value: Fraction) -> Any:
        raw = from_rational(value.numerator, value.denominator, self.mp.prec, round_nearest)
        return self.mp.make_mpf(raw)

    def apply(self, name: str, args: Sequence[Any]) -> Any:
        """An unknown function: some smooth function of its name, its arguments and the point."""
        total = self.symbol(name) if name in self._values else self.mp.mpf(0)
        for place, arg in enumerate(args):
            if abs(magnitude(arg)) > 64:
                raise Undefined("an unknown function far from its sample points")
            scale, shift = _seeded_pair(f"{name}/{len(args)}/{place}")
            total += self._tried(self.mp.sin, scale * arg + shift) + scale * arg
        return total + _seeded_pair(name)[0]

    def as_integer(self, value: Any) -> int:
        if not isinstance(value, self.mp.mpf) or abs(value) > 1 << 62 or value != int(value):
            raise Undefined("an integer is needed")
        return int(value)

    def add(self, left: Any, right: Any) -> Any:
        self._budget.spend(2 * self._cost)
        if left and right:
            self._lose(abs(magnitude(left) - magnitude(right)))
        return self._bounded(left + right)

    def multiply(self, left: Any, right: Any) -> Any:
        self._budget.spend(2 * self._cost)
        return self._bounded(left * right)

    def negate(self, value: Any) -> Any:
        return -value

    def invert(self, value: Any) -> Any:
        self._budget.spend(self._cost)
        if not value:
            raise Undefined("division by zero")
        return self._bounded(1 / value)

    def degrees(self, value: Any) -> Any:
        return value * self.mp.pi / 180

    def power(self, base: Any, exponent: Any) -> Any:
        if not base:
            if isinstance(exponent, self.mp.mpf) and exponent > 0:
                return base
            raise Undefined("zero to a power that is not positive")
        size = abs(magnitude(base)) + 1
        exponent_bits = magnitude(exponent) if exponent else 0
        if exponent_bits > 48 or size << max(0, exponent_bits) > _MAX_MAGNITUDE_BITS:
            raise TooBig("a power out of range")
        is_real = isinstance(exponent, self.mp.mpf)
        if is_real and exponent == int(exponent):
            self._budget.spend(self._cost * (4 + 2 * max(0, exponent_bits)))
            return self._bounded(base ** int(exponent))
        self._lose(-exponent_bits)  # 2^{10^{-50}} is 1 but for its last bits
        return self._tried(self.mp.power, base, exponent)

    def root(self, radicand: Any, index: Any) -> Any:
        n = self.as_integer(index) if isinstance(index, self.mp.mpf) and index == int(index) else 0
        if n == 2:
            return self._tried(self.mp.sqrt, radicand)
        if isinstance(radicand, self.mp.mpf) and radicand < 0 and n % 2 == 1:
            return -self.power(-radicand, 1 / self.mp.mpf(n))
        if not index:
            raise Undefined("a root of index zero")
        return self.power(radicand, 1 / index)

    def call(self, name: str, args: Sequence[Any]) -> Any:
        if name in ("gcd", "lcm", "factorial", "double_factorial", "binom", "permutations", "mod"):
            return self._integer_function(name, args)
        if name in ("max", "min", "floor", "ceil", "sgn"):
            return self._real_function(name, [self._real(arg) for arg in args])
        if name in _PARTS:
            if hasattr(args[0], "_mpc_") and args[0].real and args[0].imag:
                self._lose(abs(magnitude(args[0].real) - magnitude(args[0].imag)))
            return _PARTS[name](self.mp, args[0])
        if name == "log":
            name = "lg" if self._decimal_log else "ln"
        if name not in _ELEMENTARY:
            raise Undefined(f"function {name}")
        bits = magnitude(args[0]) if args[0] else 0
        if bits > 4 * self.mp.prec and name not in ("ln", "lg"):
            raise TooBig(f"{name} of a huge number")
        if name in _GROWING and bits > 40:
            raise TooBig(f"{name} of a huge number")
        self._lose(abs(bits) if name in _LEVELLING else -bits)
        if name in _GROWING and bits > 0:
            self._lose(min(3 << bits, policy.MAX_PRECISION_BITS))  # tanh x is 1 - 2 e^{-2x}
        return self._tried(_ELEMENTARY[name], self.mp, args[0])

    def _lose(self, bits: int) -> None:
        if bits > _UNNOTICED_BITS:
            self.lost_bits += bits

    def _real_function(self, name: str, args: Sequence[Any]) -> Any:
        if name in ("max", "min"):
            return max(args) if name == "max" else min(args)
        value = args[0]
        if name == "sgn":
            return self.mp.mpf((value > 0) - (value < 0))
        if magnitude(value) > self.mp.prec // 2:
            raise TooBig(f"{name} of a huge number")
        # A value that is an integer but for rounding must not fall to the next one.
        nearest = self.mp.nint(value)
        if abs(value - nearest) < self.mp.ldexp(1, -self.mp.prec // 2):
            return nearest
        return self.mp.floor(value) if name == "floor" else self.mp.ceil(value)

    def _integer_function(self, name: str, args: Sequence[Any]) -> Any:
        integers = [self.as_integer(arg) for arg in args]
        if (name == "factorial" and integers[0] > 500) or (
            name == "double_factorial" and (integers[0] > 500)
        ):
            raise TooBig("a large factorial")
        exact = ExactField()
        self._budget.spend(20 * self._cost)
        try:
            value = exact.call(name, [exact.integer(integer) for integer in integers])
        except NotExact as error:
            raise Undefined(str(error)) from None
        return self.mp.mpf(value.numerator) / value.denominator

    def _real(self, value: Any) -> Any:
        if not isinstance(value, self.mp.mpf):
            raise Undefined("a real number is needed")
        return value

    def _tried(self, function: Callable[..., Any], *args: Any) -> Any:
        self._budget.spend(25 * self._cost * self._cost)
        try:
            value = function(*args)
        except (ZeroDivisionError, ValueError, OverflowError) as error:
            raise Undefined(str(error)) from None
        if self._is_real and isinstance(value, self.mp.mpc):
            raise Undefined("not a real number")
        return self._bounded(value)

    def _bounded(self, value: Any) -> Any:
        if value:
            bits = magnitude(value)
            if abs(bits) > _MAX_MAGNITUDE_BITS or _has_extreme_part(value):
                raise TooBig("a value out of range")
            self.largest_bits = max(self.largest_bits, bits)
        return value


def _has_extreme_part(value: Any) -> bool:
    """Whether a part of a complex number is so huge or tiny that its modulus takes long."""
    return hasattr(value, "_mpc_") and any(
        part and abs(magnitude(part)) > _MAX_COMPLEX_MAGNITUDE_BITS
        for part in (value.real, value.imag)
    )


def magnitude(value: Any) -> int:
    """About log2 of the absolute value of a number that is not zero. Raises Undefined."""
    if hasattr(value, "_mpc_"):
        parts = [part for part in (value.real, value.imag) if part]
        return max(magnitude(part) for part in parts) if parts else 0
    _, mantissa, exponent, bit_count = value._mpf_
    if not mantissa and exponent:
        raise Undefined("infinite or not a number")
    return int(exponent + bit_count)


_ELEMENTARY: dict[str, Callable[[Any, Any], Any]] = {
    "sin": lambda mp, x: mp.sin(x),
    "cos": lambda mp, x: mp.cos(x),
    "tan": lambda mp, x: mp.tan(x),
    "cot": lambda mp, x: mp.cot(x),
    "sec": lambda mp, x: mp.sec(x),
    "csc": lambda mp, x: mp.csc(x),
    "arcsin": lambda mp, x: mp.asin(x),
    "arccos": lambda mp, x: mp.acos(x),
    "arctan": lambda mp, x: mp.atan(x),
    "arccot": lambda mp, x: mp.pi / 2 - mp.atan(x),
    "arcsec": lambda mp, x: mp.acos(1 / x),
    "arccsc": lambda mp, x: mp.asin(1 / x),
    "sinh": lambda mp, x: mp.sinh(x),
    "cosh": lambda mp, x: mp.cosh(x),
    "tanh": lambda mp, x: mp.tanh(x),
    "coth": lambda mp, x: mp.coth(x),
    "sech": lambda mp, x: mp.sech(x),
    "csch": lambda mp, x: mp.csch(x),
    "arsinh": lambda mp, x: mp.asinh(x),
    "arcosh": lambda mp, x: mp.acosh(x),
    "artanh": lambda mp, x: mp.atanh(x),
    "ln": lambda mp, x: mp.ln(x),
    "lg": lambda mp, x: mp.ln(x) / mp.ln(10),
}
_GROWING = frozenset(("sinh", "cosh", "tanh", "coth", "sech", "csch"))
# Functions that hide how large their argument is; those of a small one all are near 0 or 1.
_LEVELLING = _GROWING | {"arctan", "arccot", "arcsec", "arccsc", "arsinh", "arcosh"}
_PARTS: dict[str, Callable[[Any, Any], Any]] = {
    "abs": lambda mp, x: abs(x),
    "Re": lambda mp, x: mp.re(x),
    "Im": lambda mp, x: mp.im(x),
    "arg": lambda mp, x: mp.arg(x),
}


@lru_cache(maxsize=1024)
def _seeded_pair(name: str) -> tuple[float, float]:
    random = Random(name)
    return 0.5 + random.random(), 1 + random.random()
