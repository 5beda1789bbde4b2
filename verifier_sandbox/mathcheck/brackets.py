"""Match brackets of an answer, where intervals mix them: [0,1), ]0,1[ and (0;1]."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import policy
from .result import TooBig, Unreadable
from .tokens import Kind, Token

_ROUND_OR_SQUARE = frozenset("([")
_MAX_BRACKETS = 400
_OPENERS_BEFORE = frozenset((Kind.SET_OPERATOR, Kind.RELATION, Kind.OPEN, Kind.SEPARATOR))
_CLOSERS_AFTER = frozenset((Kind.SET_OPERATOR, Kind.CLOSE, Kind.SEPARATOR, Kind.TEXT))


def orient(tokens: Sequence[Token]) -> list[Token]:
    """Give the outward brackets of ]0,1[ their true roles: an opening and a closing one.

    The text keeps the bracket that was written: an opening token with the text "]" excludes its
    end point, and so does a closing one with the text ")".
    """
    oriented = list(tokens)
    if not any([token.text in ("[", "-") for token in tokens]):
        return oriented
    for place, token in enumerate(tokens):
        before = tokens[place - 1] if place else None
        after = tokens[place + 1] if place + 1 < len(tokens) else None
        if token.is_(Kind.CLOSE, "[") and (before is None or before.kind in _OPENERS_BEFORE):
            oriented[place] = Token(Kind.OPEN, "]", spaced=token.spaced)
        elif (
            token.is_(Kind.OPEN, "[") and place and (after is None or after.kind in _CLOSERS_AFTER)
        ):
            oriented[place] = Token(Kind.CLOSE, "]", spaced=token.spaced)
        elif (
            token.is_(Kind.OPERATOR, "-")
            and before is not None
            and before.kind is Kind.CLOSE
            and after is not None
            and after.is_(Kind.OPEN, r"\{")
        ):
            oriented[place] = Token(Kind.SET_OPERATOR, "setminus")  # R - {0}
    return oriented


def depths(tokens: Sequence[Token]) -> list[int]:
    """Bracket depth of each token; a bracket has the depth of what is outside it.

    Raises Unreadable if brackets do not match: an unbalanced answer is never repaired.
    """
    stack: list[Token] = []
    result: list[int] = []
    for token in tokens:
        if token.kind in (Kind.OPEN, Kind.BEGIN):
            result.append(len(stack))
            stack.append(token)
            if len(stack) > _MAX_BRACKETS:
                raise TooBig("brackets nested too deep")
            continue
        is_closing = token.kind in (Kind.CLOSE, Kind.END)
        if is_closing and not (stack and _fit(stack.pop(), token)):
            raise Unreadable("brackets do not match")
        result.append(len(stack))
    if stack:
        raise Unreadable("a bracket is not closed")
    return result


def _fit(opening: Token, closing: Token) -> bool:
    if opening.text in ("(", "[", "]") and closing.text in ("(", "[", "]"):
        return True
    return opening.text == closing.text


def split(
    tokens: Sequence[Token], is_cut: Callable[[Token], bool]
) -> tuple[list[list[Token]], list[Token]]:
    """The parts between the tokens that cut outside all brackets, and those tokens."""
    if not any(map(is_cut, tokens)):
        return [list(tokens)], []
    parts: list[list[Token]] = [[]]
    cuts: list[Token] = []
    for token, depth in zip(tokens, depths(tokens), strict=True):
        if depth == 0 and is_cut(token):
            parts.append([])
            cuts.append(token)
        else:
            parts[-1].append(token)
    if len(parts) > policy.MAX_ITEMS:
        raise TooBig(f"more than {policy.MAX_ITEMS} parts")
    return parts, cuts


def split_at(
    tokens: Sequence[Token], kind: Kind, *texts: str
) -> tuple[list[list[Token]], list[Token]]:
    """`split` at tokens of one kind; most answers have none, so those are told first."""
    if not any([token.kind is kind for token in tokens]):  # a list is faster for so few tokens
        return [list(tokens)], []
    return split(tokens, lambda token: token.is_(kind, *texts))


def is_wrapped(tokens: Sequence[Token], *openings: str) -> bool:
    """Whether one pair of brackets, opened by one of these, encloses all the tokens."""
    if len(tokens) < 2 or tokens[0].kind not in (Kind.OPEN, Kind.BEGIN):
        return False
    if openings and tokens[0].text not in openings:
        return False
    levels = depths(tokens)
    return (
        levels[-1] == 0
        and all(level > 0 for level in levels[1:-1])
        and tokens[-1].kind in (Kind.CLOSE, Kind.END)
    )


def unwrap_groups(tokens: Sequence[Token]) -> list[Token]:
    """Remove plain braces around everything; linear however deep they are nested."""
    stack: list[int] = []
    partner: dict[int, int] = {}
    for place, token in enumerate(tokens):
        if token.kind in (Kind.OPEN, Kind.BEGIN):
            stack.append(place)
        elif token.kind in (Kind.CLOSE, Kind.END) and stack:
            partner[stack.pop()] = place
    count = 0
    while (
        tokens[count : count + 1]
        and tokens[count].is_(Kind.OPEN, "{")
        and (partner.get(count) == len(tokens) - 1 - count)
    ):
        count += 1
    return list(tokens[count : len(tokens) - count])
