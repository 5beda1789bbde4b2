"""What stands between braces: elements, or x with a condition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .answers import (
    Answer,
    Family,
    Membership,
    NumberSet,
    Order,
    Phrase,
    Quantity,
    Sequence_,
)
from .brackets import split
from .nodes import Op
from .read_lists import mentions
from .tokens import Kind, Token

_Read = Callable[[list[Token]], Answer]


def has_separator(tokens: Sequence[Token]) -> bool:
    """Whether a comma or semicolon stands outside all brackets."""
    _, cuts = split(tokens, lambda token: token.is_(Kind.SEPARATOR, ",", ";"))
    return bool(cuts)


def describes_set(tokens: Sequence[Token]) -> bool:
    """Whether it reads `x : condition` or `x | condition`."""
    mark = next((i for i, token in enumerate(tokens) if token.text in (":", "mid", "|")), 0)
    return mark == 1 and any(token.kind is Kind.RELATION for token in tokens[mark:])


def read_set(inside: list[Token], read: _Read) -> Answer:
    """The set whose braces enclose the tokens. `read` reads an answer inside this one."""
    if not inside:
        return Sequence_(Order.SET, ())
    sides, bars = split(
        inside, lambda token: token.is_(Kind.OPERATOR, "mid", "|") or token.is_(Kind.SEPARATOR, ":")
    )
    if bars and len(sides) >= 2 and sides[0]:
        return _set_builder(read(sides[0]), read(inside[len(sides[0]) + 1 :]))
    answer = read(inside)
    if isinstance(answer, Sequence_) and answer.order is Order.LIST:
        return Sequence_(Order.SET, answer.items)
    if isinstance(answer, Phrase):
        return answer
    return Sequence_(Order.SET, (answer,))


def _set_builder(element: Answer, condition: Answer) -> Answer:
    """{x | x > 2} is its condition, {2k | k in Z} a family; any other keeps its two parts."""
    if isinstance(element, Membership) and element.container != NumberSet("R"):
        return Phrase((element, "|", condition))
    name = _bare_name(element)
    if isinstance(condition, Membership):
        if condition.name == name and condition.is_member:
            return condition.container
        if not name and condition.is_member and isinstance(condition.container, NumberSet):
            return Family(element, condition.name, condition.container.name)
    elif name and mentions(condition, name):
        return condition
    return Phrase((element, "|", condition))


def _bare_name(element: Answer) -> str:
    """The name of x or of x in R; empty for an expression."""
    if isinstance(element, Membership):
        return element.name if element.is_member else ""
    if isinstance(element, Quantity) and element.node.op is Op.SYMBOL:
        return element.node.name
    return ""
