"""Seeded points at which expressions with symbols are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from random import Random
from typing import Any

from .name_tables import name_set
from .nodes import Node, Op, has_constant, symbols
from .numeric import Gaussian
from .steps import alternates, clipping_constants

_INTEGER_FUNCTIONS = name_set("factorial double_factorial binom permutations mod gcd lcm")
_COMPLEX_FUNCTIONS = name_set("Re Im arg abs")
_ROUNDING = name_set("floor ceil")
_USUAL_INTEGERS = frozenset("klmn")
_PARTS = name_set("Re Im arg")
_COMPLEX_NAMES = frozenset(("z", "w"))


class Scale(Enum):
    """Where a point lies."""

    NEAR = "near"  # all values are of the size of one, or integers
    FAR = "far"  # huge and tiny ones
    COMPLEX = "complex"


class _Sign(Enum):
    """Which sign the values of a point have."""

    PLUS = "plus"
    MIXED = "mixed"
    BY_NAME = "by name"
    AGAINST_NAME = "against name"  # so that each symbol has both


@dataclass(frozen=True)
class Point:
    """Values for all symbols."""

    values: Mapping[str, Any]
    scale: Scale
    is_extra: bool = False
    """Whether it comes on top of the points that must agree, as the functions have steps."""


@dataclass(frozen=True)
class _Range:
    """The sizes of the values, in units of 1/1009; and those of symbols that stand for integers."""

    low: int
    high: int
    sign: _Sign = _Sign.MIXED
    scale: Scale = Scale.NEAR
    integers: tuple[int, int] = (1, 9)


_POSITIVE = _Range(300, 2900, _Sign.PLUS)
_MIXED = _Range(300, 2900)
_RANGES = (
    *(_POSITIVE, _MIXED, _POSITIVE),
    _Range(10**5, 2 * 10**5, _Sign.BY_NAME, Scale.FAR, (10, 24)),
    _Range(10**5, 2 * 10**5, _Sign.AGAINST_NAME, Scale.FAR, (10, 24)),
    _Range(10**12, 10**15, _Sign.BY_NAME, Scale.FAR, (25, 60)),
    _Range(10**12, 10**15, _Sign.AGAINST_NAME, Scale.FAR),
    _Range(1, 20, _Sign.MIXED, Scale.FAR),
    *(_MIXED, _POSITIVE, _MIXED, _POSITIVE, _POSITIVE),
)
_NUM_INTEGER_POINTS = 4
_NUM_COMPLEX_POINTS = 2
_NUM_STEPS = 8
_SHORT_SUM, _LONG_SUM, _LONG_SUM_INDEX = (1, 7), (10, 12), 3


def points(left: Node, right: Node) -> tuple[Point, ...]:
    """Complex points if a symbol may be complex; near and far real ones; positive integers."""
    both = Node(Op.MULTIPLY, (left, right))
    integers, bounds = _integer_symbols(both)
    ordinary = _points(symbols(both), integers, bounds, _complex_symbols(both) - integers)
    if not alternates(both) and not clipping_constants(both):
        return ordinary
    return (*_step_points(both), *ordinary)


def _step_points(node: Node) -> Iterator[Point]:
    """Consecutive whole numbers, and values around those that a minimum is taken with."""
    names = sorted(symbols(node))
    for start in range(1, 1 + _NUM_STEPS * alternates(node)):
        values = {name: Fraction(start + 3 * place) for place, name in enumerate(names)}
        yield Point(values, Scale.NEAR, is_extra=True)
    for constant in clipping_constants(node):
        for size in (constant / 3, constant * 3, 1 / (3 * constant), 3 / constant):
            for sign in (1, -1):
                yield Point(dict.fromkeys(names, sign * size), Scale.FAR, is_extra=True)


@lru_cache(maxsize=512)
def _points(
    names: frozenset[str],
    integers: frozenset[str],
    bounds: frozenset[str],
    complex_names: frozenset[str],
) -> tuple[Point, ...]:
    found = []
    for index in range(_NUM_COMPLEX_POINTS if complex_names else 0):
        values: dict[str, Fraction | Gaussian] = {
            n: _complex(n, index) if n in complex_names else _real(n, index) for n in names
        }
        found.append(Point(values, Scale.COMPLEX))
    for index, sizes in enumerate(_RANGES):
        values = {
            n: _integer(n, index, n in bounds) if n in integers else _real(n, index) for n in names
        }
        found.append(Point(values, Scale.NEAR if integers >= names else sizes.scale))
    for index in range(_NUM_INTEGER_POINTS):
        values = {n: _integer(n, -1 - index, True) for n in names}
        found.append(Point(values, Scale.NEAR))
    return tuple(found)


def _real(name: str, index: int) -> Fraction:
    random = Random(f"{name} {index}")
    sizes = _RANGES[index]
    value = Fraction(random.randint(sizes.low, sizes.high), 1009)
    if sizes.sign is _Sign.PLUS:
        return value
    if sizes.sign is _Sign.MIXED:
        return -value if random.random() < 0.6 else value
    is_negative = (Random(name).random() < 0.5) is (sizes.sign is _Sign.BY_NAME)
    return -value if is_negative else value


def _complex(name: str, index: int) -> Gaussian:
    """A number in the right half of the plane: roots and logarithms keep their branch there."""
    random = Random(f"{name} {index} complex")
    real, imaginary = (Fraction(random.randint(300, 1900), 1009) for _ in range(2))
    return Gaussian(real, imaginary if index % 2 else -imaginary)


def _integer(name: str, index: int, is_bound: bool) -> Fraction:
    low, high = _RANGES[index].integers if index >= 0 else (1, 9)
    if is_bound:  # every term up to it is computed
        low, high = _LONG_SUM if index == _LONG_SUM_INDEX else _SHORT_SUM
    return Fraction(Random(f"{name} {index} integer").randint(low, high))


def _integer_symbols(node: Node) -> tuple[frozenset[str], frozenset[str]]:
    """Symbols that stand for whole numbers (in factorials, bounds of sums), and those bounds."""
    found: set[str] = set()
    bounds: set[str] = set()
    for part in node.walk():
        if part.op is Op.CALL and part.name in _INTEGER_FUNCTIONS:
            found |= symbols(part)
        elif part.op is Op.CALL and part.name in _ROUNDING:
            found |= symbols(part) & _USUAL_INTEGERS
        elif part.op in (Op.SUM, Op.PRODUCT):
            bounds |= symbols(part.args[0]) | symbols(part.args[1])
    return frozenset(found | bounds), frozenset(bounds)


def _complex_symbols(node: Node) -> frozenset[str]:
    """Symbols that may be complex: z and w next to i or Re, and x in Re x."""
    found = {
        part.args[0].name
        for part in node.walk()
        if part.op is Op.CALL and part.name in _PARTS and part.args[0].op is Op.SYMBOL
    }
    is_complex = has_constant(node, "i") or any(
        part.op is Op.CALL and part.name in _COMPLEX_FUNCTIONS for part in node.walk()
    )
    if is_complex:
        found |= _COMPLEX_NAMES & symbols(node)
    return frozenset(found)
