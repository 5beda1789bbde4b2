r"""SymPy for references that our own parser does not read: integrals, limits, infinite sums.

`load` imports latex2sympy2_extended, if it is installed (the extra `sympy`); nothing here works
before that, so the ordinary path never pays for SymPy. Only a reference comes here on its own; a
prediction follows only where its reference did, because an integral that answers with the question
itself must not pay. What SymPy returns is translated into our own tree and compared like any other
expression: no `simplify`, and no text ever reaches `eval`, `sympify` or `parse_expr`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from .nodes import Node, Op, call, number
from .result import Unreadable

MAX_CHARS = 300
_WORTH_TRYING = re.compile(r"\\(?:i*int|lim|sum|prod|d?frac\s*\{\s*(?:d|\\partial)\b)")
# Static cost guard: long numbers, factorials, towers and deep nesting make SymPy slow.
_COSTLY = re.compile(
    r"\d{5}|!|\^\s*(?:\{[^{}]*\^|\w\s*\^)|\\(?:begin|binom|text|input|write|def)|[^\x00-\x7f]"
)
_MAX_COMMANDS = 4  # of the expensive kind in one expression
_MAX_NODES = 200

_parse: Callable[[str], Any] | None = None


def load() -> bool:
    """Import the parser and run it once, as a confined process cannot import; False if missing."""
    global _parse
    try:
        from latex2sympy2_extended import latex2sympy
    except ImportError:
        return False
    _parse = latex2sympy
    for warm_up in (r"\int_0^1 x^2 dx", r"\lim_{x \to 0} \frac{\sin x}{x}"):
        read(warm_up)
    return True


def is_loaded() -> bool:
    """Whether `load` found the parser."""
    return _parse is not None


def read(text: str) -> Node:
    """The value of a reference as SymPy finds it. Raises Unreadable."""
    if _parse is None:
        raise Unreadable("SymPy is not loaded")
    if len(text) > MAX_CHARS or _COSTLY.search(text) is not None:
        raise Unreadable("too costly for SymPy")
    if not 1 <= len(_WORTH_TRYING.findall(text)) <= _MAX_COMMANDS:
        raise Unreadable("nothing that SymPy would read better")
    try:
        expression = _parse(text).doit()
    except Exception as error:  # the parser raises bare Exception, SymPy whatever its parts raise
        raise Unreadable(f"SymPy: {type(error).__name__}") from None
    return _translated(expression, [_MAX_NODES])


def _translated(expression: Any, nodes_left: list[int]) -> Node:
    """A SymPy expression as our own tree. Raises Unreadable for what has no counterpart."""
    nodes_left[0] -= 1
    if nodes_left[0] < 0:
        raise Unreadable("SymPy: a long result")
    kind = type(expression).__name__
    if getattr(expression, "is_Rational", False):
        return number(Fraction(int(expression.p), int(expression.q)))
    if kind in _CONSTANTS:
        return _CONSTANTS[kind]
    if kind in ("Symbol", "Dummy"):
        return Node(Op.SYMBOL, name=str(expression.name))
    args = tuple(_translated(arg, nodes_left) for arg in getattr(expression, "args", ()))
    if kind in _OPERATORS:
        return Node(_OPERATORS[kind], args)
    if kind == "exp":
        return Node(Op.POWER, (_CONSTANTS["Exp1"], *args))
    if kind in _FUNCTIONS and args:
        return call(_FUNCTIONS[kind], *args)
    raise Unreadable(f"SymPy: {kind} has no counterpart")


_CONSTANTS = {
    "Pi": Node(Op.CONSTANT, name="pi"),
    "Exp1": Node(Op.CONSTANT, name="e"),
    "ImaginaryUnit": Node(Op.CONSTANT, name="i"),
    "Infinity": Node(Op.CONSTANT, name="infinity"),
    "NegativeInfinity": Node(Op.NEGATE, (Node(Op.CONSTANT, name="infinity"),)),
}
_OPERATORS = {"Add": Op.ADD, "Mul": Op.MULTIPLY, "Pow": Op.POWER}
_FUNCTIONS = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    **{"asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arsinh", "acosh": "arcosh"},
    **{"atanh": "artanh", "log": "ln", "Abs": "abs", "factorial": "factorial", "floor": "floor"},
    **{"ceiling": "ceil", "binomial": "binom", "Max": "max", "Min": "min", "re": "Re", "im": "Im"},
}
