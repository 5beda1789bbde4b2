"""Evaluate a syntax tree over a field: exact rationals or high-precision numbers.

A value is a scalar of the field or a matrix of them, so matrix products, determinants and
transposes need no layer of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, Protocol

from . import matrices, policy
from .matrices import Matrix
from .nodes import Literal, Node, Op
from .result import TooBig, Undefined

_TRIGONOMETRIC = frozenset(("sin", "cos", "tan", "cot", "sec", "csc"))


class Field(Protocol):
    """The arithmetic that evaluation needs."""

    def number(self, literal: Literal) -> Any: ...
    def integer(self, value: int) -> Any: ...
    def constant(self, name: str) -> Any: ...
    def symbol(self, name: str) -> Any: ...
    def apply(self, name: str, args: Sequence[Any]) -> Any: ...
    def as_integer(self, value: Any) -> int: ...
    def add(self, left: Any, right: Any) -> Any: ...
    def multiply(self, left: Any, right: Any) -> Any: ...
    def negate(self, value: Any) -> Any: ...
    def invert(self, value: Any) -> Any: ...
    def degrees(self, value: Any) -> Any: ...
    def power(self, base: Any, exponent: Any) -> Any: ...
    def root(self, radicand: Any, index: Any) -> Any: ...
    def call(self, name: str, args: Sequence[Any]) -> Any: ...


class Evaluator:
    """Evaluates nodes over one field. `radians`: a degree mark outside a sine means pi / 180."""

    def __init__(self, field: Field, *, radians: bool = False) -> None:
        self.field = field
        self._radians = radians
        self._bound: dict[str, Any] = {}  # indices of the sums around the current node

    def value(self, node: Node) -> Any:
        """The value of the node. Raises Undefined or TooBig, and what the field raises."""
        return getattr(self, node.op.method)(node)

    def _number(self, node: Node) -> Any:
        assert node.literal is not None
        return self.field.number(node.literal)

    def _constant(self, node: Node) -> Any:
        if node.name in self._bound:
            return self._bound[node.name]
        return self.field.constant(node.name)

    def _symbol(self, node: Node) -> Any:
        if node.name in self._bound:
            return self._bound[node.name]
        return self.field.symbol(node.name)

    def _apply(self, node: Node) -> Any:
        return self.field.apply(node.name, self._scalars(node.args))

    def _add(self, node: Node) -> Any:
        return reduce(self._sum_of_two, map(self.value, node.args))

    def _sum_of_two(self, left: Any, right: Any) -> Any:
        if isinstance(left, Matrix) or isinstance(right, Matrix):
            return matrices.add(self.field, left, right)
        return self.field.add(left, right)

    def _multiply(self, node: Node) -> Any:
        return reduce(self._product_of_two, map(self.value, node.args))

    def _product_of_two(self, left: Any, right: Any) -> Any:
        if isinstance(left, Matrix) or isinstance(right, Matrix):
            return matrices.multiply(self.field, left, right)
        return self.field.multiply(left, right)

    def _negate(self, node: Node) -> Any:
        value = self.value(node.args[0])
        if isinstance(value, Matrix):
            return matrices.multiply(self.field, self.field.integer(-1), value)
        return self.field.negate(value)

    def _invert(self, node: Node) -> Any:
        value = self.value(node.args[0])
        if isinstance(value, Matrix):
            return matrices.inverse(self.field, value)
        return self.field.invert(value)

    def _power(self, node: Node) -> Any:
        base, exponent = self.value(node.args[0]), self.value(node.args[1])
        if isinstance(base, Matrix):
            return matrices.power(self.field, base, self.field.as_integer(exponent))
        if isinstance(exponent, Matrix):
            raise Undefined("a matrix as an exponent")
        fraction = _odd_root_exponent(node.args[1])
        if fraction is not None:
            numerator, denominator = (self.field.integer(part) for part in fraction)
            return self.field.power(self.field.root(base, denominator), numerator)
        return self.field.power(base, exponent)

    def _root(self, node: Node) -> Any:
        radicand, index = self._scalars(node.args)
        return self.field.root(radicand, index)

    def _call(self, node: Node) -> Any:
        if node.name in ("det", "tr"):
            matrix = self.value(node.args[0])
            if not isinstance(matrix, Matrix):
                raise Undefined(f"{node.name} of a number")
            function = matrices.determinant if node.name == "det" else matrices.trace
            return function(self.field, matrix)
        if node.name in _TRIGONOMETRIC:
            outside, self._radians = self._radians, True
            args = self._scalars(node.args)
            self._radians = outside
        else:
            args = self._scalars(node.args)
        return self.field.call(node.name, args)

    def _degree(self, node: Node) -> Any:
        value = self._scalar(node.args[0])
        return self.field.degrees(value) if self._radians else value

    def _percent(self, node: Node) -> Any:
        hundredth = self.field.invert(self.field.integer(100))
        return self.field.multiply(self._scalar(node.args[0]), hundredth)

    def _sum(self, node: Node) -> Any:
        return self._repeated(node, self._sum_of_two, self.field.integer(0))

    def _product(self, node: Node) -> Any:
        return self._repeated(node, self._product_of_two, self.field.integer(1))

    def _repeated(self, node: Node, operation: Any, total: Any) -> Any:
        begin, end = (self.field.as_integer(bound) for bound in self._scalars(node.args[:2]))
        if end - begin >= policy.MAX_TERMS:
            raise TooBig(f"a sum of more than {policy.MAX_TERMS} terms")
        outside = self._bound
        for index in range(begin, end + 1):
            self._bound = {**outside, node.name: self.field.integer(index)}
            total = operation(total, self.value(node.args[2]))
        self._bound = outside
        return total

    def _matrix(self, node: Node) -> Any:
        rows = tuple(tuple(self._scalars(row.args)) for row in node.args)
        return Matrix(rows)

    def _transpose(self, node: Node) -> Any:
        value = self.value(node.args[0])
        return matrices.transpose(value) if isinstance(value, Matrix) else value

    def _plus_minus(self, node: Node) -> Any:
        raise Undefined("a plus-minus sign has two values")

    def _matrix_row(self, node: Node) -> Any:
        raise Undefined("a row outside a matrix")

    def _scalars(self, nodes: Sequence[Node]) -> list[Any]:
        return [self._scalar(node) for node in nodes]

    def _scalar(self, node: Node) -> Any:
        value = self.value(node)
        if isinstance(value, Matrix):
            raise Undefined("a matrix where a number should be")
        return value


def _odd_root_exponent(exponent: Node) -> tuple[int, int] | None:
    """(p, q) if the exponent is the fraction p/q of integer literals with an odd q > 1."""
    if exponent.op is not Op.MULTIPLY or len(exponent.args) != 2:
        return None
    above, inverse = exponent.args
    sign = 1
    if above.op is Op.NEGATE:
        sign, above = -1, above.args[0]
    below = inverse.args[0] if inverse.op is Op.INVERT else None
    if below is None or above.literal is None or below.literal is None:
        return None
    p, q = above.literal.value, below.literal.value
    if p.denominator != 1 or q.denominator != 1 or q.numerator % 2 == 0 or q <= 1 or q > 99:
        return None
    return sign * p.numerator, q.numerator
