"""Lists whose last elements say something about the first: k pi, k in Z and x != 1, 2."""

from __future__ import annotations

from .answers import (
    Answer,
    Assignment,
    Conditions,
    Family,
    Membership,
    NumberSet,
    Order,
    Quantity,
    Relation,
    Sequence_,
)
from .nodes import symbols
from .tokens import Kind, Token


def with_comma_before_domain(tokens: list[Token]) -> list[Token]:
    r"""k \pi (k \in Z) as k \pi, k \in Z."""
    if not tokens[-1].is_(Kind.CLOSE, "(") or not any(
        token.is_(Kind.RELATION, "in") for token in tokens
    ):
        return tokens
    start = max((i for i, token in enumerate(tokens) if token.is_(Kind.OPEN, "(")), default=0)
    inside = tokens[start + 1 : -1]
    if not start or not any(token.is_(Kind.RELATION, "in") for token in inside):
        return tokens
    return [*tokens[:start], Token(Kind.SEPARATOR, ","), *inside]


def with_domain(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    r"""In k \pi, k \in Z the last element says what the parameter of the others is."""
    last = items[-1]
    if not isinstance(last, Membership) or not isinstance(last.container, NumberSet):
        return items
    rest = items[:-1]
    if not last.is_member or not any(_mentions(answer, last.name) for answer in rest):
        return items
    if last.container.name == "R":
        return rest
    answer = rest[0] if len(rest) == 1 else Sequence_(Order.LIST, rest)
    return (Family(answer, last.name, last.container.name),)


def excluded_values(items: tuple[Answer, ...]) -> Answer | None:
    """In x != 1, 2 the relation holds for every value; None for anything else."""
    first = items[0]
    if not isinstance(first, Relation) or first.relations != ("!=",):
        return None
    values = [item for item in items[1:] if isinstance(item, Quantity)]
    if len(values) < len(items) - 1:
        return None
    name = first.sides[0]
    relations = tuple(Relation((name, value.node), ("!=",)) for value in values)
    return Conditions("and", (first, *relations))


def _mentions(answer: Answer, name: str) -> bool:
    """Whether a symbol of this name occurs."""
    if isinstance(answer, Quantity):
        return name in symbols(answer.node)
    if isinstance(answer, Relation):
        return any(name in symbols(side) for side in answer.sides)
    if isinstance(answer, Assignment):
        return answer.name == name or _mentions(answer.value, name)
    return isinstance(answer, Sequence_) and any(_mentions(item, name) for item in answer.items)
