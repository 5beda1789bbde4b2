"""Lists whose last elements say something about the first: k pi, k in Z and x != 1, 2."""

from __future__ import annotations

from typing import TypeGuard

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
from .nodes import Op, symbols
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


def with_connector(tokens: list[Token]) -> list[Token]:
    """1, 2 y 3 and 1, 2 e 3 as 1, 2 and 3: two numbers in a row are no product."""
    commas = [i for i, token in enumerate(tokens) if token.is_(Kind.SEPARATOR, ",")]
    if not commas:
        return tokens
    for place in range(commas[-1] + 2, len(tokens) - 1):
        before, token, after = tokens[place - 1 : place + 2]
        if (
            token.is_(Kind.LETTER, "y", "e")
            and token.spaced
            and before.kind in (Kind.NUMBER, Kind.CLOSE)
            and after.kind is Kind.NUMBER
            and after.spaced
        ):
            return [*tokens[:place], Token(Kind.SEPARATOR, "and"), *tokens[place + 1 :]]
    return tokens


def with_domain(items: tuple[Answer, ...], *, is_disjunction: bool) -> tuple[Answer, ...]:
    r"""In k \pi, k \in Z the last element says what the parameter of the others is."""
    last = items[-1]
    if not isinstance(last, Membership) or not isinstance(last.container, NumberSet):
        return items
    rest = items[:-1]
    if not last.is_member or not any(mentions(answer, last.name) for answer in rest):
        return items
    while len(rest) > 1 and _is_symbol(rest[-1]) and mentions(rest[0], rest[-1].node.name):
        rest = rest[:-1]  # a, b in R
    answer = rest[0] if len(rest) == 1 else Sequence_(Order.LIST, rest, is_disjunction)
    return (Family(answer, last.name, last.container.name),)


def _is_symbol(answer: Answer) -> TypeGuard[Quantity]:
    return isinstance(answer, Quantity) and answer.node.op is Op.SYMBOL


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


def mentions(answer: Answer, name: str) -> bool:
    """Whether a symbol of this name occurs."""
    if isinstance(answer, Quantity):
        return name in symbols(answer.node)
    if isinstance(answer, Relation):
        return any(name in symbols(side) for side in answer.sides)
    if isinstance(answer, Assignment):
        return answer.name == name or mentions(answer.value, name)
    if isinstance(answer, Family):
        return mentions(answer.answer, name)
    if isinstance(answer, Conditions):
        return any(mentions(part, name) for part in answer.parts)
    if isinstance(answer, Membership):
        return answer.name == name
    return isinstance(answer, Sequence_) and any(mentions(item, name) for item in answer.items)
