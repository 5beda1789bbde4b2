"""Points where an expression in one variable can change its sign.

A superset is enough: the caller tests membership at all of them and between. Products and
quotients are taken apart, absolute values branch, and what remains must be linear or quadratic.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from . import policy
from .nodes import Node, Op, symbols
from .numeric import WorkBudget, context
from .result import TooBig, Undefined, Unreadable
from .values import coarse_value_of

_MAX_BRANCHES = 3


def candidate_roots(node: Node, variable: str, budget: WorkBudget) -> list[Any]:
    """All real zeros and poles of the expression, and maybe more points.

    Raises Unreadable if the expression is beyond the method.
    """
    budget.spend(20)
    if variable not in symbols(node):
        return []
    if node.op in (Op.NEGATE, Op.INVERT):
        return candidate_roots(node.args[0], variable, budget)
    if node.op is Op.MULTIPLY:
        return [root for arg in node.args for root in candidate_roots(arg, variable, budget)]
    if node.op in (Op.POWER, Op.ROOT) and variable not in symbols(node.args[1]):
        return candidate_roots(node.args[0], variable, budget)
    if (inner := _first_absolute(node, variable)) is not None:
        return candidate_roots(inner.args[0], variable, budget) + [
            root
            for branch in _branches(node, inner)
            for root in candidate_roots(branch, variable, budget)
        ]
    poles = [
        root
        for part in node.walk()
        if part.op is Op.INVERT
        for root in candidate_roots(part, variable, budget)
    ]
    return poles + _quadratic_roots(node, variable, budget)


def _first_absolute(node: Node, variable: str) -> Node | None:
    found = [
        part
        for part in node.walk()
        if part.op is Op.CALL and part.name == "abs" and variable in symbols(part)
    ]
    if len(found) > _MAX_BRANCHES:
        raise TooBig(f"more than {_MAX_BRANCHES} absolute values")
    return found[0] if found else None


def _branches(node: Node, absolute: Node) -> list[Node]:
    inner = absolute.args[0]
    return [_replaced(node, absolute, branch) for branch in (inner, Node(Op.NEGATE, (inner,)))]


def _replaced(node: Node, old: Node, new: Node) -> Node:
    if node == old:
        return new
    args = tuple(_replaced(arg, old, new) for arg in node.args)
    return Node(node.op, args, node.name, node.literal)


def _quadratic_roots(node: Node, variable: str, budget: WorkBudget) -> list[Any]:
    """Roots of an expression that is, after clearing its denominators, at most quadratic."""
    denominators = [
        part.args[0] for part in node.walk() if part.op is Op.INVERT and variable in symbols(part)
    ]
    cleared = Node(Op.MULTIPLY, (node, *denominators)) if denominators else node

    def at(x: Fraction) -> Any:
        return coarse_value_of(cleared, budget, {variable: x})

    try:
        # Points without meaning, so that no denominator vanishes there.
        xs = [Fraction(k, 7919) for k in (-9001, 4447, 13331, 25013, -31337)]
        ys = [at(x) for x in xs]
    except Undefined:
        raise Unreadable("not defined everywhere") from None
    mp = context(policy.PRECISION_BITS)
    points = [mp.mpf(x.numerator) / x.denominator for x in xs]
    c0, c1, c2 = _newton(points[:3], ys[:3])
    scale = max(abs(y) for y in ys) + 1
    for x, y in zip(points[3:], ys[3:], strict=True):
        if abs(c0 + c1 * x + c2 * x * x - y) > scale * mp.ldexp(1, -100):
            raise Unreadable("neither linear nor quadratic")
    tiny = scale * mp.ldexp(1, -120)
    if abs(c2) <= tiny:
        return [] if abs(c1) <= tiny else [-c0 / c1]
    discriminant = c1 * c1 - 4 * c2 * c0
    if discriminant < -tiny:
        return []
    root = mp.sqrt(discriminant) if discriminant > tiny else mp.mpf(0)
    return [(-c1 - root) / (2 * c2), (-c1 + root) / (2 * c2)]


def _newton(xs: list[Any], ys: list[Any]) -> tuple[Any, Any, Any]:
    """Coefficients of the parabola through three points."""
    first = (ys[1] - ys[0]) / (xs[1] - xs[0])
    second = ((ys[2] - ys[1]) / (xs[2] - xs[1]) - first) / (xs[2] - xs[0])
    c1 = first - second * (xs[0] + xs[1])
    return ys[0] - c1 * xs[0] - second * xs[0] ** 2, c1, second
