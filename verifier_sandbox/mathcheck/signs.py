"""Expressions with plus-minus signs and the values they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from .answers import Answer, Assignment, Quantity
from .nodes import Node, Op, contains
from .result import TooBig


def expand_signs(answer: Answer) -> tuple[Answer, ...] | None:
    r"""The values of an expression with \pm, or None if it has none.

    The signs are independent, unless \mp occurs: then one choice sets all of them.
    """
    if isinstance(answer, Assignment):
        values = expand_signs(answer.value)
        if values is None:
            return None
        return tuple(replace(answer, value=value) for value in values)
    if not isinstance(answer, Quantity) or not contains(answer.node, Op.PLUS_MINUS):
        return None
    marks = [node.name for node in answer.node.walk() if node.op is Op.PLUS_MINUS]
    if len(marks) > 4:
        raise TooBig("more than 4 plus-minus signs")
    choices = (
        [(sign,) * len(marks) for sign in (1, -1)]
        if "mp" in marks
        else list(product((1, -1), repeat=len(marks)))
    )
    return tuple(replace(answer, node=_with_signs(answer.node, iter(choice))) for choice in choices)


def _with_signs(node: Node, signs: Iterator[int]) -> Node:
    if node.op is Op.PLUS_MINUS:
        sign = next(signs) * (-1 if node.name == "mp" else 1)
        inner = _with_signs(node.args[0], signs)
        return inner if sign > 0 else Node(Op.NEGATE, (inner,))
    if not node.args:
        return node
    return Node(
        node.op, tuple(_with_signs(arg, signs) for arg in node.args), node.name, node.literal
    )
