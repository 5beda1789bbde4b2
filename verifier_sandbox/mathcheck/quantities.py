"""Compare two expressions with their units, percent signs, degrees and constants of integration."""

from __future__ import annotations

from dataclasses import replace

from . import equality
from .answers import Quantity
from .nodes import Node, Op, number, symbols
from .numeric import WorkBudget

_INTEGRATION_CONSTANTS = frozenset(["C", "c", "K", "k"])


def quantities_equal(reference: Quantity, prediction: Quantity, budget: WorkBudget) -> bool:
    """Whether value and unit agree; a unit, percent or degree sign may be missing on one side."""
    if reference.unit and prediction.unit and reference.unit != prediction.unit:
        return False
    left, right = reference.node, _with_same_constant(reference.node, prediction.node)
    is_percent = [node.op is Op.PERCENT for node in (left, right)]
    if any(is_percent) and not all(is_percent):
        marked, plain = (left, right) if is_percent[0] else (right, left)
        if equality.equal(marked.args[0], plain, budget):
            return True
        return equality.equal(_hundredth(marked.args[0]), plain, budget)
    if all(is_percent):
        left, right = left.args[0], right.args[0]
    return equality.equal(left, right, budget)


def _hundredth(node: Node) -> Node:
    return Node(Op.MULTIPLY, (node, Node(Op.INVERT, (number(100),))))


def _with_same_constant(reference: Node, prediction: Node) -> Node:
    """Give the prediction's constant of integration the name the reference uses."""
    wanted = _integration_constant(reference)
    found = _integration_constant(prediction)
    if wanted is None or found is None or wanted == found or wanted in symbols(prediction):
        return prediction
    terms = tuple(
        replace(term, name=wanted) if term.op is Op.SYMBOL and term.name == found else term
        for term in prediction.args
    )
    return replace(prediction, args=terms)


def _integration_constant(node: Node) -> str | None:
    """The C of an expression + C, if it is one term and occurs nowhere else."""
    if node.op is not Op.ADD:
        return None
    names = [
        term.name
        for term in node.args
        if term.op is Op.SYMBOL and term.name in _INTEGRATION_CONSTANTS
    ]
    if len(names) != 1:
        return None
    uses = sum(part.op is Op.SYMBOL and part.name == names[0] for part in node.walk())
    return names[0] if uses == 1 else None
