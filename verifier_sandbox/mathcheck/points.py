"""Seeded points at which expressions with symbols are compared."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from random import Random

from . import policy
from .name_tables import name_set
from .nodes import Node, Op, symbols

_INTEGER_FUNCTIONS = name_set("factorial double_factorial binom permutations mod gcd lcm")


def points(left: Node, right: Node) -> Iterator[dict[str, Fraction]]:
    """Values for the symbols: positive ones, ones of mixed sign, then positive integers."""
    both = Node(Op.MULTIPLY, (left, right))
    names = sorted(symbols(both))
    integers = _integer_symbols(both)
    for index in range(policy.NUM_POINTS + 5):
        kind = "positive" if index < 5 else "mixed" if index < policy.NUM_POINTS else "integer"
        yield {name: _point(name, index, "integer" if name in integers else kind) for name in names}


@lru_cache(maxsize=4096)
def _point(name: str, index: int, kind: str) -> Fraction:
    random = Random(f"{name} {index} {kind}")
    if kind == "integer":
        return Fraction(random.randint(1, 9))
    value = Fraction(random.randint(300, 2900), 1009)
    return -value if kind == "mixed" and random.random() < 0.6 else value


def _integer_symbols(node: Node) -> frozenset[str]:
    """Symbols that stand for whole numbers: in factorials, binomials and bounds of sums."""
    found: set[str] = set()
    for part in node.walk():
        if part.op is Op.CALL and part.name in _INTEGER_FUNCTIONS:
            found |= symbols(part)
        elif part.op in (Op.SUM, Op.PRODUCT):
            found |= symbols(part.args[0]) | symbols(part.args[1])
    return frozenset(found)
