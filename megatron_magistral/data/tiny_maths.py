"""The maths of the tiny world: structures of two calculations over small operands.

A structure is the arithmetic alone; the same structure and operands may be told in any language
and wording. Structures take two calculations, so that working step by step pays: a small model can
learn each calculation but not the composition of both at a glance. Drills take one of those
calculations alone and are for training only: held-out problems then ask for nothing but new
compositions of known steps.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import gcd

Operands = tuple[int, ...]


@dataclass(frozen=True)
class Slip:
    """An arithmetic slip: the result of calculation `step` is off by `delta`."""

    step: int
    delta: int

    def apply(self, step: int, value: int) -> int:
        """The result as written down; it stays positive, as a human's slip would."""
        if step != self.step:
            return value
        return value + self.delta if value + self.delta > 0 else value - self.delta


NO_SLIP = Slip(step=-1, delta=0)


@dataclass(frozen=True)
class Worked:
    """A worked solution: (operation, calculation in LaTeX) per step, and the final answer."""

    steps: tuple[tuple[str, str], ...]
    answer: str


@dataclass(frozen=True)
class MathsStructure:
    """`wordings` are keys of `Wording.statements`; `operands` is the whole space, in order.

    `commuting` lists positions whose operands may change places without changing the answer.
    A drill is never held out.
    """

    category: str
    wordings: tuple[str, ...]
    operands: tuple[Operands, ...]
    formula: Callable[[Operands, str], str]  # (operands, letter) -> LaTeX
    solve: Callable[[Operands, str, Slip], Worked]
    commuting: tuple[tuple[int, ...], ...] = ()
    num_steps: int = 2
    is_drill: bool = False

    def canonical(self, operands: Operands) -> Operands:
        """The same for all operands that make the same calculation."""
        ordered = list(operands)
        for positions in self.commuting:
            values = sorted(operands[position] for position in positions)
            for position, value in zip(positions, values, strict=True):
                ordered[position] = value
        return tuple(ordered)


def fraction(numerator: int, denominator: int) -> str:
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _gain_loss(operands: Operands, letter: str, slip: Slip) -> Worked:
    a, b, c = operands
    total = slip.apply(0, a + b)
    rest = slip.apply(1, total - c)
    return Worked((("add", f"{a}+{b}={total}"), ("subtract", f"{total}-{c}={rest}")), f"{rest}")


def _groups(operands: Operands, letter: str, slip: Slip) -> Worked:
    a, b, c = operands
    boxed = slip.apply(0, a * b)
    total = slip.apply(1, boxed + c)
    return Worked(
        (("multiply", rf"{a}\cdot{b}={boxed}"), ("add", f"{boxed}+{c}={total}")), f"{total}"
    )


def _spend(operands: Operands, letter: str, slip: Slip) -> Worked:
    a, b, c = operands
    bought = slip.apply(0, a * b)
    rest = slip.apply(1, bought - c)
    return Worked(
        (("multiply", rf"{a}\cdot{b}={bought}"), ("subtract", f"{bought}-{c}={rest}")), f"{rest}"
    )


def _left(operands: Operands, letter: str, slip: Slip) -> Worked:
    a, b, n = operands
    eaten = slip.apply(0, a + b)
    rest = slip.apply(1, n - eaten)
    return Worked(
        (("add", f"{a}+{b}={eaten}"), ("subtract", f"{n}-{eaten}={rest}")), fraction(rest, n)
    )


def _product(operands: Operands, letter: str, slip: Slip) -> Worked:
    a, b, c, d = operands
    numerator = slip.apply(0, a * c)
    denominator = slip.apply(1, b * d)
    return Worked(
        (
            ("numerator", rf"{a}\cdot{c}={numerator}"),
            ("denominator", rf"{b}\cdot{d}={denominator}"),
        ),
        fraction(numerator, denominator),
    )


def _expand(operands: Operands, letter: str, slip: Slip) -> Worked:
    a, b, c = operands
    scaled = slip.apply(0, a * b)
    constant = slip.apply(1, scaled + c)
    return Worked(
        (("multiply", rf"{a}\cdot{b}={scaled}"), ("add", f"{scaled}+{c}={constant}")),
        f"{a}{letter}+{constant}",
    )


def _expand_product(operands: Operands, letter: str, slip: Slip) -> Worked:
    a, b = operands
    linear = slip.apply(0, a + b)
    constant = slip.apply(1, a * b)
    return Worked(
        (("add", f"{a}+{b}={linear}"), ("multiply", rf"{a}\cdot{b}={constant}")),
        f"{letter}^2+{linear}{letter}+{constant}",
    )


def _space(*ranges: range, keep: Callable[..., bool] = lambda *_: True) -> tuple[Operands, ...]:
    return tuple(operands for operands in product(*ranges) if keep(*operands))


_SMALL = range(2, 6)
_LARGE = range(2, 7)

MATHS_STRUCTURES = {
    "gain_loss": MathsStructure(
        category="maths/numeric",
        wordings=("gain_loss", "value"),
        operands=_space(_LARGE, _LARGE, _SMALL, keep=lambda a, b, c: c < a + b),
        formula=lambda o, letter: f"{o[0]}+{o[1]}-{o[2]}",
        solve=_gain_loss,
        commuting=((0, 1),),
    ),
    "groups": MathsStructure(
        category="maths/numeric",
        wordings=("groups", "value"),
        operands=_space(_SMALL, _LARGE, _LARGE),
        formula=lambda o, letter: rf"{o[0]}\cdot{o[1]}+{o[2]}",
        solve=_groups,
        commuting=((0, 1),),
    ),
    "spend": MathsStructure(
        category="maths/numeric",
        wordings=("spend", "value"),
        operands=_space(_SMALL, _LARGE, _SMALL, keep=lambda a, b, c: c < a * b),
        formula=lambda o, letter: rf"{o[0]}\cdot{o[1]}-{o[2]}",
        solve=_spend,
        commuting=((0, 1),),
    ),
    "left": MathsStructure(
        category="maths/fraction",
        wordings=("left", "value"),
        operands=_space(
            range(1, 6),
            range(1, 6),
            range(5, 14),
            keep=lambda a, b, n: a + b < n and gcd(n - a - b, n) == 1,
        ),
        formula=lambda o, letter: f"1-{fraction(o[0], o[2])}-{fraction(o[1], o[2])}",
        solve=_left,
        commuting=((0, 1),),
    ),
    "product": MathsStructure(
        category="maths/fraction",
        wordings=("value",),
        operands=_space(
            range(1, 7),
            _LARGE,
            range(1, 7),
            _LARGE,
            keep=lambda a, b, c, d: gcd(a * c, b * d) == 1,
        ),
        formula=lambda o, letter: rf"{fraction(o[0], o[1])}\cdot{fraction(o[2], o[3])}",
        solve=_product,
        commuting=((0, 2), (1, 3)),
    ),
    "expand": MathsStructure(
        category="maths/symbolic",
        wordings=("expand",),
        operands=_space(_SMALL, _LARGE, _LARGE),
        formula=lambda o, letter: f"{o[0]}({letter}+{o[1]})+{o[2]}",
        solve=_expand,
    ),
    "expand_product": MathsStructure(
        category="maths/symbolic",
        wordings=("expand",),
        operands=_space(_LARGE, _LARGE),
        formula=lambda o, letter: f"({letter}+{o[0]})({letter}+{o[1]})",
        solve=_expand_product,
        commuting=((0, 1),),
    ),
}


_CALCULATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("+", operator.add),
    "subtract": ("-", operator.sub),
    "multiply": (r"\cdot", operator.mul),
}


def _drill(operation: str) -> MathsStructure:
    """All calculations of one kind that some structure has as a step."""
    sign, calculate = _CALCULATIONS[operation]
    step = re.compile(rf"(\d+){re.escape(sign)}(\d+)=")
    facts = {
        (int(found[1]), int(found[2]))
        for structure in MATHS_STRUCTURES.values()
        for operands in structure.operands
        for _, work in structure.solve(operands, "x", NO_SLIP).steps
        if (found := step.match(work))
    }

    def solve(operands: Operands, letter: str, slip: Slip) -> Worked:
        a, b = operands
        result = slip.apply(0, calculate(a, b))
        return Worked(((operation, f"{a}{sign}{b}={result}"),), f"{result}")

    return MathsStructure(
        category="maths/numeric",
        wordings=("value",),
        operands=tuple(sorted(facts)),
        formula=lambda o, letter: f"{o[0]}{sign}{o[1]}",
        solve=solve,
        num_steps=1,
        is_drill=True,
    )


MATHS_STRUCTURES |= {f"drill_{operation}": _drill(operation) for operation in _CALCULATIONS}
