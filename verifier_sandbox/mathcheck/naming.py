"""Names on the left of an equals sign, and their one spelling."""

from __future__ import annotations

from collections.abc import Sequence

from . import words
from .brackets import depths, is_wrapped, split
from .functions import UNKNOWN_FUNCTIONS
from .labels import is_plain_label
from .name_tables import name_set
from .nodes import Node
from .parser import parse_expression
from .result import TooBig, Unreadable
from .tokens import Kind, Token

_TRIGONOMETRIC = name_set("sin cos tan cot sec csc")


def is_name(tokens: Sequence[Token]) -> bool:
    """Whether the tokens name something: x, x_1, f(x), |AB|, (p,q,r), S_{AB}:S, words."""
    if not tokens or len(tokens) > 40:
        return False
    if tokens[0].kind is Kind.TEXT and all(map(_is_point, tokens[1:])):
        return True
    if len(tokens) == 1:
        return tokens[0].kind is Kind.LETTER and tokens[0].text not in ("e",)
    if _is_inverse_function(tokens):
        return True
    if any(
        token.kind is Kind.RELATION or token.text in ("+", "-", "*", "/", "^", "pm", "frac")
        for token in tokens
    ):
        return False
    if is_wrapped(tokens, "("):
        parts, cuts = split(tokens[1:-1], lambda token: token.is_(Kind.SEPARATOR, ","))
        return bool(cuts) and all(map(is_name, parts))
    parts, cuts = split(tokens, lambda token: token.is_(Kind.SEPARATOR, ":"))
    if cuts:
        return all(map(is_name, parts))
    return _is_applied_name(tokens)


def _is_point(token: Token) -> bool:
    """Whether it is a letter of a figure, as in "area of ABC"."""
    return token.kind is Kind.TEXT or (
        token.kind is Kind.LETTER and (token.text.isupper() or token.text == "\\triangle")
    )


def _is_inverse_function(tokens: Sequence[Token]) -> bool:
    """Whether it reads f^{-1}(x)."""
    script = [token.text for token in tokens[1:6]]
    is_inverse = tokens[0].text in UNKNOWN_FUNCTIONS and script == ["^", "{", "-", "1", "{"]
    return is_inverse and is_wrapped(tokens[6:], "(")


def _is_applied_name(tokens: Sequence[Token]) -> bool:
    head, rest = tokens[0], tokens[1:]
    if head.is_(Kind.NAME, "overline", "vec", "hat", "arc"):
        return len(rest) == 1 or is_wrapped(rest, "{")
    if head.is_(Kind.NAME, "det") or (head.kind is Kind.NAME and head.text in _TRIGONOMETRIC):
        return is_wrapped(rest, "(") or all(token.kind is Kind.LETTER for token in rest)
    if head.is_(Kind.LETTER, "m") and rest[0].is_(Kind.LETTER, r"\angle"):
        return _is_applied_name(rest)
    if head.is_(Kind.OPERATOR, "|"):
        return rest[-1].is_(Kind.OPERATOR, "|") and all(
            token.kind is Kind.LETTER for token in rest[:-1]
        )
    if head.kind is not Kind.LETTER:
        return False
    if head.text in ("\\angle", "\\triangle") and all(t.kind is Kind.LETTER for t in rest):
        return True
    if all(token.kind is Kind.LETTER and token.text.isupper() for token in tokens):
        return True  # the ends of a segment
    return _is_indexed_name(head, _without_index(rest))


def _without_index(rest: Sequence[Token]) -> Sequence[Token]:
    """What follows the primes and the index of a name."""
    while rest and rest[0].text == "'":
        rest = rest[1:]
    if len(rest) > 1 and rest[0].is_(Kind.OPERATOR, "_"):
        end = 2
        if rest[1].is_(Kind.OPEN, "{"):
            closing = (i for i, level in enumerate(depths(rest[1:])) if level == 0 and i)
            end = next(closing) + 2
        rest = rest[end:]
    return rest


def _is_indexed_name(head: Token, rest: Sequence[Token]) -> bool:
    """Whether nothing follows but arguments: f(x), P(A), f(2) but not f(2x)."""
    if not rest:
        return True
    has_number = any(token.kind is Kind.NUMBER for token in rest)
    return is_wrapped(rest, "(") and (head.text.isupper() or not has_number or len(rest) == 3)


def is_label(tokens: Sequence[Token]) -> bool:
    """Whether a name only says what a value is of; |x| = 5 says something about x instead."""
    head = tokens[0]
    if head.kind is Kind.TEXT:
        return is_plain_label(" ".join(token.text for token in tokens if token.kind is Kind.TEXT))
    if is_wrapped(tokens, "("):
        parts, _ = split(tokens[1:-1], lambda token: token.is_(Kind.SEPARATOR, ","))
        names = [name_of(part) for part in parts]
        return names == sorted(names)  # (y, x) = (1, 2) is x = 2
    if head.is_(Kind.OPERATOR, "|"):
        return len(tokens) > 3 and all(token.text.isupper() for token in tokens[1:-1])
    return not (head.kind is Kind.NAME and head.text in _TRIGONOMETRIC)


def name_of(tokens: Sequence[Token]) -> str:
    texts = [token.text for token in tokens]
    if all(token.kind is Kind.TEXT for token in tokens):
        return words.plain_words(" ".join(texts))
    return "".join(text for text in texts if text not in ("{", "}"))


def name_node(tokens: Sequence[Token]) -> Node | None:
    try:
        return parse_expression(tokens)
    except (Unreadable, TooBig):
        return None
