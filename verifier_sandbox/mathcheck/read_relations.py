"""Relations: equations, inequalities, memberships and congruences."""

from __future__ import annotations

from collections.abc import Callable

from .answers import (
    Answer,
    Assignment,
    Conditions,
    Congruence,
    Membership,
    Quantity,
    Relation,
)
from .naming import is_label, is_name, name_node, name_of
from .nodes import Op
from .parser import parse_expression
from .result import Unreadable
from .signs import expand_signs
from .tokens import Token

_INEQUALITIES = frozenset(("<", ">", "<=", ">=", "!="))


def read_relation(
    sides: list[list[Token]], relations: list[str], read: Callable[[list[Token]], Answer]
) -> Answer:
    """A membership, a congruence, a name with its value, or a chain of expressions.

    `read` reads an answer inside this one. Raises Unreadable.
    """
    if any(not side for side in sides):
        raise Unreadable("a side of a relation is missing")
    if relations[0] in ("in", "notin") and len(sides) == 2:
        name = name_of(sides[0])
        return Membership(name, read(sides[1]), relations[0] == "in")
    if relations == ["==="]:
        return _congruence(sides)
    if set(relations) <= {"=", "~"}:
        return _equations(sides, relations, read)
    if not set(relations) <= _INEQUALITIES | {"="}:
        raise Unreadable(f"relation {relations[0]}")
    relation = Relation(tuple(parse_expression(side) for side in sides), tuple(relations))
    values = expand_signs(Quantity(relation.sides[-1]))
    if relations == ["!="] and values is not None:
        nodes = [value.node for value in values if isinstance(value, Quantity)]
        return Conditions("and", tuple(Relation((relation.sides[0], n), ("!=",)) for n in nodes))
    return relation


def _equations(
    sides: list[list[Token]], relations: list[str], read: Callable[[list[Token]], Answer]
) -> Answer:
    """A name with its value, or a chain of equal expressions."""
    if is_name(sides[-1]) and not is_name(sides[0]) and len(sides) == 2:
        sides = sides[::-1]
    if not is_name(sides[0]):
        chain = Relation(tuple(parse_expression(side) for side in sides), tuple(relations))
        return chain
    name, node = name_of(sides[0]), name_node(sides[0])
    if len(sides) == 2:
        return Assignment(name, read(sides[1]), node, is_label(sides[0]))
    rest = Relation(tuple(parse_expression(side) for side in sides[1:]), tuple(relations[1:]))
    return Assignment(name, rest, node, is_label(sides[0]))


def _congruence(sides: list[list[Token]]) -> Congruence:
    node = parse_expression(sides[1])
    if node.op is not Op.CALL or node.name != "mod":
        raise Unreadable("a congruence without a modulus")
    value, modulus = node.args
    return Congruence(value, modulus, name_of(sides[0]) if is_name(sides[0]) else "")
