"""Sets of real numbers that are written as intervals, or can be."""

from __future__ import annotations

from .answers import (
    Answer,
    Conditions,
    Interval,
    Membership,
    NumberSet,
    Order,
    Quantity,
    Relation,
    Sequence_,
    SetOperation,
)
from .nodes import Node, Op, number, symbols

FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
_INFINITY = Node(Op.CONSTANT, name="infinity")
_MINUS_INFINITY = Node(Op.NEGATE, (_INFINITY,))
_REALS = Interval(_MINUS_INFINITY, _INFINITY, False, False)

_POSITIVE = Interval(number(0), _INFINITY, False, False)
_NEGATIVE = Interval(_MINUS_INFINITY, number(0), False, False)
NUMBER_SETS = {
    "R": (_REALS,),
    **dict.fromkeys(("R^+", "R_+", "R_>0"), (_POSITIVE,)),
    **dict.fromkeys(("R^-", "R_-", "R_<0"), (_NEGATIVE,)),
    "R_>=0": (Interval(number(0), _INFINITY, True, False),),
    **dict.fromkeys(("R^*", "R_!=0"), (_NEGATIVE, _POSITIVE)),
}


def are_intervals(sequence: Sequence_) -> bool:
    """Whether it lists pairs only, which may be open intervals: (0,1), (1,2)."""
    return sequence.order is Order.LIST and all(
        isinstance(item, Sequence_) and item.order is Order.TUPLE and len(item.items) == 2
        for item in sequence.items
    )


def pieces_of(answer: Answer) -> list[Interval] | None:
    """The intervals of a union, or None if the answer is not written as one."""
    if isinstance(answer, NumberSet):
        return list(NUMBER_SETS[answer.name]) if answer.name in NUMBER_SETS else None
    if isinstance(answer, Interval):
        return [answer]
    if isinstance(answer, Sequence_) and answer.order is Order.TUPLE and len(answer.items) == 2:
        ends = [item.node for item in answer.items if isinstance(item, Quantity)]
        return [Interval(ends[0], ends[1], False, False)] if len(ends) == 2 else None
    if isinstance(answer, Membership):
        return pieces_of(answer.container) if answer.is_member else None
    if isinstance(answer, Relation):
        return _isolated(answer)
    if isinstance(answer, Sequence_) and are_intervals(answer):
        parts = [pieces_of(item) for item in answer.items]
    elif (isinstance(answer, SetOperation) and set(answer.operators) == {"cup"}) or (
        isinstance(answer, Conditions) and answer.joined_by == "or"
    ):
        parts = [pieces_of(part) for part in answer.parts]
    else:
        return None
    if any(part is None for part in parts):
        return None
    return [piece for part in parts if part is not None for piece in part]


def _isolated(relation: Relation) -> list[Interval] | None:
    """x > a, a < x <= b and x != a as intervals, for any expressions a and b."""
    sides, relations = relation.sides, relation.relations
    if len(sides) == 2 and sides[1].op is Op.SYMBOL and sides[0].op is not Op.SYMBOL:
        sides, relations = sides[::-1], (FLIPPED.get(relations[0], "="),)
    if len(sides) == 2 and sides[0].op is Op.SYMBOL and sides[0].name not in symbols(sides[1]):
        bound = sides[1]
        return {
            "<": [Interval(_MINUS_INFINITY, bound, False, False)],
            "<=": [Interval(_MINUS_INFINITY, bound, False, True)],
            ">": [Interval(bound, _INFINITY, False, False)],
            ">=": [Interval(bound, _INFINITY, True, False)],
            "!=": [
                Interval(_MINUS_INFINITY, bound, False, False),
                Interval(bound, _INFINITY, False, False),
            ],
        }.get(relations[0])
    if len(sides) == 3 and sides[1].op is Op.SYMBOL:
        if set(relations) <= {"<", "<="}:
            return [Interval(sides[0], sides[2], relations[0] == "<=", relations[1] == "<=")]
        if set(relations) <= {">", ">="}:
            return [Interval(sides[2], sides[0], relations[1] == ">=", relations[0] == ">=")]
    return None


def contains_infinity(node: Node) -> bool:
    """Whether the end point is infinite: a bracket there includes nothing."""
    return any(part.op is Op.CONSTANT and part.name == "infinity" for part in node.walk())
