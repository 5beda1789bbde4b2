"""The programs of the tiny world: read one or two integers, print a multiple plus a constant.

A structure is a form (`number`, `sum`, `larger`) with operands (a, b): print a times the form's
value plus b, where b may be negative. Python and C++ share structures and operands, and so the
side of the split. C++ starts with `#include <bits/stdc++.h>`, which a judge has precompiled.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from megatron_magistral.data.tiny_maths import Operands
from megatron_magistral.types import CodeLanguage, TestCase

NUM_TESTS = 4

TOOL_NAMES = {CodeLanguage.PYTHON: "Python", CodeLanguage.CPP: "C++"}

_CPP_PROGRAM = (
    "#include <bits/stdc++.h>\nint main(){{int {declare};std::cin>>{read};std::cout<<{print};}}"
)


@dataclass(frozen=True)
class Form:
    """How many integers are read, what is computed from them and how each language writes it."""

    num_inputs: int
    value: Callable[[list[int]], int]
    python: str
    cpp: str


FORMS = {
    "number": Form(1, lambda numbers: numbers[0], "n", "n"),
    "sum": Form(2, sum, "(x+y)", "(x+y)"),
    "larger": Form(2, max, "max(x,y)", "std::max(x,y)"),
}

CODE_OPERANDS: tuple[Operands, ...] = tuple(
    (a, b) for a, b in product(range(2, 13), range(-12, 13)) if b != 0
)


def program(form_name: str, operands: Operands, language: CodeLanguage) -> str:
    """The program's source, without a fence."""
    form = FORMS[form_name]
    a, b = operands
    if language is CodeLanguage.PYTHON:
        read = "n=int(input())" if form.num_inputs == 1 else "x,y=map(int,input().split())"
        return f"{read}\nprint({a}*{form.python}{b:+d})"
    if form.num_inputs == 1:
        declare, read = "n", "n"
    else:
        declare, read = "x,y", "x>>y"
    return _CPP_PROGRAM.format(declare=declare, read=read, print=f"{a}*{form.cpp}{b:+d}")


def test_cases(form_name: str, operands: Operands) -> tuple[TestCase, ...]:
    """Inputs drawn from the structure itself: the same problem always has the same tests."""
    form = FORMS[form_name]
    a, b = operands
    rng = random.Random(f"{form_name} {operands}")
    cases = []
    for _ in range(NUM_TESTS):
        numbers = [rng.randint(-50, 99) for _ in range(form.num_inputs)]
        line = " ".join(map(str, numbers))
        cases.append(TestCase(input=f"{line}\n", output=f"{a * form.value(numbers) + b}\n"))
    return tuple(cases)


def misread(operands: Operands, rng: random.Random) -> Operands:
    """Operands as a hasty reader takes them: one is off by one, or the sign is turned."""
    a, b = operands
    slips = [(a + 1, b), (a - 1, b), (a, -b), (a, b + 1 if b != -1 else b - 1)]
    return rng.choice(slips)
