"""Compare two expressions with their units, percent signs, degrees and constants of integration."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from . import equality
from .answers import Quantity
from .facts import facts_of
from .nodes import Node, Op, has_constant, number, symbols
from .numeric import WorkBudget

_TEMPERATURES = frozenset(("celsius", "fahrenheit"))
_INTEGRATION_CONSTANTS = frozenset(["C", "c", "K", "k"])


def quantities_equal(reference: Quantity, prediction: Quantity, budget: WorkBudget) -> bool:
    """Whether value and unit agree; a unit, percent or degree sign may be missing on one side."""
    left, right = reference.node, _with_same_constant(reference.node, prediction.node)
    kinds = [_kind(side) for side in (reference, prediction)]
    if not reference.unit and not prediction.has_plain_unit:
        return False
    if is_residue(left) or is_residue(right):
        return _same_residue(left, right, budget)
    if reference.unit and prediction.unit and kinds[0] == kinds[1] == "percent":
        return reference.unit == prediction.unit and equality.equal(left, right, budget)
    if all(kinds) and kinds[0] != kinds[1]:
        if "degree" not in kinds:
            return False
        if "radian" in kinds:
            left, right = _in_radians(left), _in_radians(right)
        elif not _TEMPERATURES.isdisjoint(kinds):
            left, right = _without_degree(left), _without_degree(right)
        else:
            return False
    if any("+" in kind for kind in kinds) and not all(kinds):
        return False  # of 3 h 45 min no single number is the value
    is_percent = [node.op is Op.PERCENT for node in (left, right)]
    if any(is_percent) and not all(is_percent):
        marked, plain = (left, right) if is_percent[0] else (right, left)
        is_dropped = marked is left or _is_one_or_more(plain, budget)  # 0.2 % is not 0.2
        if is_dropped and equality.equal(marked.args[0], plain, budget):
            return True
        return equality.equal(_hundredth(marked.args[0]), plain, budget)
    if all(is_percent):
        left, right = left.args[0], right.args[0]
    if kinds[0] != kinds[1] and has_constant(right if kinds[0] else left, "pi"):
        left, right = _in_radians(left), _in_radians(right)
    return equality.equal(left, right, budget)


def _is_one_or_more(node: Node, budget: WorkBudget) -> bool:
    value = facts_of(node, budget).exact
    return isinstance(value, Fraction) and value >= 1


def is_residue(node: Node) -> bool:
    """Whether it reads 3 mod 5 and no more."""
    return node.op is Op.CALL and node.name == "mod"


def _same_residue(reference: Node, prediction: Node, budget: WorkBudget) -> bool:
    """The same class of the same modulus; where one side names none, the number itself."""
    if is_residue(reference) and is_residue(prediction):
        same_modulus = equality.equal(reference.args[1], prediction.args[1], budget)
        return same_modulus and equality.equal(reference, prediction, budget)
    if is_residue(prediction):
        return all(equality.equal(reference, n, budget) for n in (prediction, prediction.args[0]))
    return any(equality.equal(n, prediction, budget) for n in (reference, reference.args[0]))


def _kind(quantity: Quantity) -> str:
    """What the number counts: its unit, "percent", "degree", or "" if it does not say."""
    if quantity.node.op is Op.PERCENT:
        return "percent"
    if quantity.unit:
        return quantity.unit
    return "degree" if _is_angle(quantity.node) else ""


def _is_angle(node: Node) -> bool:
    """Whether a degree mark stands outside all functions."""
    if node.op is Op.DEGREE:
        return True
    return node.op in (Op.ADD, Op.MULTIPLY, Op.NEGATE) and any(map(_is_angle, node.args))


def _in_radians(node: Node) -> Node:
    if node.op is Op.DEGREE:
        pi = Node(Op.CONSTANT, name="pi")
        return Node(Op.MULTIPLY, (*node.args, pi, Node(Op.INVERT, (number(180),))))
    if node.op in (Op.ADD, Op.MULTIPLY, Op.NEGATE):
        return Node(node.op, tuple(map(_in_radians, node.args)))
    return node


def _without_degree(node: Node) -> Node:
    if node.op is Op.NEGATE:
        return Node(Op.NEGATE, (_without_degree(node.args[0]),))
    return node.args[0] if node.op is Op.DEGREE else node


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
