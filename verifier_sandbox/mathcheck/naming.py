"""Names on the left of an equals sign, and their one spelling."""

from __future__ import annotations

from collections.abc import Sequence

from . import words
from .brackets import is_wrapped, split
from .functions import UNKNOWN_FUNCTIONS
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
    if all(token.kind is Kind.TEXT for token in tokens):
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


def _is_inverse_function(tokens: Sequence[Token]) -> bool:
    """Whether it reads f^{-1}(x)."""
    script = [token.text for token in tokens[1:6]]
    is_inverse = tokens[0].text in UNKNOWN_FUNCTIONS and script == ["^", "{", "-", "1", "{"]
    return is_inverse and is_wrapped(tokens[6:], "(")


def _is_applied_name(tokens: Sequence[Token]) -> bool:
    head = tokens[0]
    if head.is_(Kind.NAME, "overline", "vec", "hat", "arc", "det"):
        return True
    if head.kind is Kind.NAME and head.text in _TRIGONOMETRIC:
        return all(token.kind is Kind.LETTER for token in tokens[1:])
    if head.is_(Kind.LETTER, "m") and tokens[1].is_(Kind.LETTER, r"\angle"):
        return _is_applied_name(tokens[1:])
    if head.is_(Kind.OPERATOR, "|"):
        inner = tokens[1:-1]
        return tokens[-1].is_(Kind.OPERATOR, "|") and all(
            token.kind is Kind.LETTER for token in inner
        )
    if head.kind is not Kind.LETTER:
        return False
    rest = tokens[1:]
    if head.text in ("\\angle", "\\triangle") or head.text.isupper():
        return all(token.kind is Kind.LETTER for token in rest) or rest[0].text in ("_", "(", "'")
    if rest[0].text == "_":
        return rest[-1].kind is not Kind.OPERATOR and (
            len(rest) == 2 or is_wrapped(rest[1:], "{") or is_wrapped(rest[-3:], "(")
        )
    while rest and rest[0].text == "'":
        rest = rest[1:]
    return not rest or (
        is_wrapped(rest, "(")
        and not any(token.kind is Kind.NUMBER and len(rest) > 3 for token in rest)
    )


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
