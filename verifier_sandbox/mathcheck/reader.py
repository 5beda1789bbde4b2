"""Read tokens as an answer: find its shape from the outside in.

Each function handles one level and hands the parts down: separators, then relations, then set
operators, then brackets, then one expression with its unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from . import policy, units, words
from .answers import (
    Answer,
    Assignment,
    Clock,
    Conditions,
    Date,
    Interval,
    NumberSet,
    Order,
    Phrase,
    Quantity,
    Ratio,
    Relation,
    Sequence_,
    SetOperation,
    Words,
)
from .brackets import is_wrapped, orient, split, split_at, unwrap_groups
from .naming import is_label
from .nodes import Node, Op, number
from .parser import parse_expression
from .read_lists import excluded_values, with_comma_before_domain, with_connector, with_domain
from .read_relations import read_relation
from .read_sets import describes_set, has_separator, read_set
from .read_special import read_based, read_clock, read_compound, read_date, read_quantity
from .result import TooBig, Unreadable
from .tokens import ROW_ENVIRONMENTS, Kind, Token

_INEQUALITIES = frozenset(("<", ">", "<=", ">=", "!="))


def read_answer(tokens: Sequence[Token], level: int = 0) -> Answer:
    """The answer that the tokens spell. Raises Unreadable or TooBig."""
    if level > 8:
        raise TooBig("answers nested too deep")
    if tokens and tokens[0].is_(Kind.OPEN, "{") and is_wrapped(tokens, "{"):
        inside = unwrap_groups(tokens)
        if describes_set(inside) or has_separator(inside):
            return read_set(inside, lambda part: read_answer(part, level + 1))
    if [token.text for token in tokens] == ["{", "{"]:
        return Sequence_(Order.SET, ())
    tokens = _trimmed(unwrap_groups(orient(tokens)))
    if not tokens:
        raise Unreadable("empty")
    is_article = tokens[0].is_(Kind.LETTER, "a", "A") and len(tokens) > 1
    if all(token.kind is Kind.TEXT for token in tokens[is_article:]):
        return _words(" ".join(token.text for token in tokens))
    if (date := _date(tokens)) is not None:
        return date
    try:
        return _separated(tokens, level)
    except Unreadable:
        phrase = _phrase(tokens, level)
        if phrase is None:
            raise
        return phrase


def _trimmed(tokens: list[Token]) -> list[Token]:
    """Without words that lead to the answer and without closing punctuation."""
    if tokens and (
        tokens[-1].is_(Kind.OPERATOR, ".")
        or tokens[-1].is_(Kind.SEPARATOR, ",", ";")
        or tokens[-1].is_(Kind.CELL, "\\\\")
    ):
        tokens = tokens[:-1]
    while len(tokens) > 1:
        head = tokens[0]
        is_lead_word = head.kind is Kind.TEXT and _is_leading(head.text)
        if is_lead_word and tokens[1].is_(Kind.RELATION, "=", "~", "=>"):
            tokens = tokens[2:]
        elif is_lead_word or (
            head.is_(Kind.SEPARATOR, ":") or head.is_(Kind.RELATION, "=", "~", "=>")
        ):
            tokens = tokens[1:]
        else:
            break
    return tokens


def _date(tokens: Sequence[Token]) -> Date | None:
    if len(tokens) > 6 or not any(token.kind is Kind.TEXT for token in tokens):
        return None
    return read_date(" ".join(token.text for token in tokens))


def _is_leading(text: str) -> bool:
    return text.casefold().strip(" .") in words.LEADING


def _words(text: str) -> Answer:
    if (date := read_date(text)) is not None:
        return date
    if text.casefold() in ("noon", "midnight"):
        return Clock(12 * 3600, "pm") if text.casefold() == "noon" else Clock(0, "am")
    if text.startswith("百分之") and (hundredths := words.number_from_words(text[3:])) is not None:
        return Quantity(Node(Op.PERCENT, (number(hundredths),)))
    if (fraction := words.fraction_from_words(text)) is not None:
        return Quantity(number(fraction))
    if (quantity := _spelled_quantity(text)) is not None:
        return quantity
    plain = words.plain_words(text)
    if plain in words.INFINITY:
        return Quantity(Node(Op.CONSTANT, name="infinity"))
    if plain in words.EMPTY_SET:
        return Sequence_(Order.SET, ())
    if plain in words.UNDEFINED:
        return Words("undefined")
    if plain in words.ALL_REALS:
        return NumberSet("R")
    if plain == "negative infinity":
        return Quantity(Node(Op.NEGATE, (Node(Op.CONSTANT, name="infinity"),)))
    for lead in words.LEADING:
        if plain.startswith(lead + " ") and lead not in ("so", "is", "also"):
            return _words(plain[len(lead) :])
    return Words(plain)


def _spelled_quantity(text: str) -> Quantity | None:
    """A number in words, with what it counts: twenty-one, five apples; None for other words."""
    spelled = text.split()
    for end in range(min(len(spelled), words.MAX_NUMBER_WORDS), 0, -1):
        value = words.number_from_words(" ".join(spelled[:end]))
        if value is None:
            continue
        rest = " ".join(spelled[end:])
        if not rest:
            return Quantity(number(value))
        is_counted = units.may_be_left_out(rest)
        return Quantity(number(value), units.canonical_unit(rest)) if is_counted else None
    return None


def _separated(tokens: list[Token], level: int) -> Answer:
    """Split on the loosest separators that stand outside all brackets."""
    if is_wrapped(tokens) and tokens[0].text in ROW_ENVIRONMENTS:
        return _rows(tokens, level)
    if (compound := read_compound(tokens)) is not None:
        return compound
    tokens = with_connector(with_comma_before_domain(tokens))
    parts, cuts = split_at(tokens, Kind.SEPARATOR, ";", "or", "and", ",")
    if not cuts:
        return _single(tokens, level)
    kinds = {cut.text for cut in cuts}
    if ";" in kinds and len(kinds) > 1:
        parts, _ = split_at(tokens, Kind.SEPARATOR, ";")
        return Sequence_(Order.LIST, tuple(read_answer(part, level + 1) for part in parts if part))
    if "or" in kinds and "," in kinds:
        grouped, _ = split_at(tokens, Kind.SEPARATOR, "or")
        if all(_has_comma_and_equals(part) for part in grouped):
            return Sequence_(Order.LIST, tuple(read_answer(part, level + 1) for part in grouped))
    # "1, 2, and 3" leaves an empty part between the comma and the word.
    filled = [part for part in parts if part]
    if len(filled) < len(parts) - sum(cut.text in ("and", "or") for cut in cuts):
        raise Unreadable("an element is missing")
    if any(len(part) == 1 and part[0].kind is Kind.DOTS for part in filled):
        return _pattern(filled, level)
    items = tuple(read_answer(part, level + 1) for part in filled)
    return _joined(items, kinds)


def _has_comma_and_equals(tokens: Sequence[Token]) -> bool:
    _, cuts = split(tokens, lambda t: t.is_(Kind.SEPARATOR, ",") or t.is_(Kind.RELATION, "="))
    return {cut.text for cut in cuts} == {",", "="}


def _joined(items: tuple[Answer, ...], kinds: set[str]) -> Answer:
    if len(items) == 1:
        return items[0]
    if any(isinstance(item, Words) and _is_hedge(item.text) for item in items):
        raise Unreadable("words that hedge")
    if {"or", "and"} <= kinds:
        raise Unreadable("and mixed with or")
    items = with_domain(items, is_disjunction="or" in kinds)
    if len(items) == 1:
        return items[0]
    if (excluded := excluded_values(items)) is not None:
        return excluded
    if any(isinstance(item, Relation | Conditions) for item in items) and kinds & {"or", "and"}:
        joined_by = "or" if "or" in kinds else "and"
        return Conditions(joined_by, items)
    return Sequence_(Order.LIST, _with_sharedname_of(items), is_disjunction="or" in kinds)


def _is_hedge(text: str) -> bool:
    return any(word in words.HEDGES or word in words.NEGATIONS for word in text.split())


def _with_sharedname_of(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """In a = 4, -8, -10 the name belongs to every value."""
    first = items[0]
    if not isinstance(first, Assignment) or any(
        not isinstance(item, Quantity) for item in items[1:]
    ):
        return items
    return (first, *(replace(first, value=item) for item in items[1:]))


def _pattern(parts: list[list[Token]], level: int) -> Phrase:
    return Phrase(
        tuple(
            "..." if len(part) == 1 and part[0].kind is Kind.DOTS else read_answer(part, level + 1)
            for part in parts
        )
    )


def _rows(tokens: list[Token], level: int) -> Answer:
    """The rows of a cases or aligned environment."""
    rows, _ = split_at(tokens[1:-1], Kind.CELL, "\\\\")
    answers: list[Answer] = []
    for row in rows:
        cells = [token for token in row if not token.is_(Kind.CELL, "&")]
        if tokens[0].text.endswith("cases") and (piece := _piece(row)) is not None:
            value, condition = (read_answer(part, level + 1) for part in piece)
            answers.append(Sequence_(Order.TUPLE, (value, condition)))
        elif cells:
            answers.append(read_answer(cells, level + 1))
    return answers[0] if len(answers) == 1 else Sequence_(Order.LIST, tuple(answers))


def _piece(row: list[Token]) -> tuple[list[Token], list[Token]] | None:
    """A value and the condition for it; None for a row of a system of equations."""
    cells, _ = split_at(row, Kind.CELL, "&")
    if len(cells) != 2 or not cells[0] or len(cells[1]) < 2 or cells[1][0].kind is Kind.RELATION:
        return None
    value, condition = cells
    if value[-1].is_(Kind.SEPARATOR, ",", ";"):
        value = value[:-1]
    if condition[0].is_(Kind.TEXT, "if", "for", "when", "wenn", "si", "se", "если", "当", "若"):
        condition = condition[1:]
    return (value, condition) if value and condition else None


# one answer


def _single(tokens: list[Token], level: int) -> Answer:
    if (based := read_based(tokens)) is not None:
        return based
    sides, relations = split_at(tokens, Kind.RELATION)
    if relations:
        return read_relation(
            sides,
            [relation.text for relation in relations],
            lambda part: read_answer(part, level + 1),
        )
    terms, colons = split_at(tokens, Kind.SEPARATOR, ":")
    if colons:
        return _colon(tokens, terms, level)
    terms, to = split_at(tokens, Kind.TEXT, "to")
    if to and all(terms):
        return Ratio(tuple(parse_expression(term) for term in terms), is_spelled=True)
    parts, operators = split_at(tokens, Kind.SET_OPERATOR)
    if operators:
        return SetOperation(
            tuple(operator.text for operator in operators),
            tuple(read_answer(part, level + 1) for part in parts),
        )
    if len(tokens) == 1 and tokens[0].is_(Kind.NAME, "emptyset"):
        return Sequence_(Order.SET, ())
    if (number_set := _number_set(tokens)) is not None:
        return number_set
    tokens = _without_transposition(tokens)
    if is_wrapped(tokens, "(", "[", "]", r"\{", "{", "angle"):
        bracketed = _bracketed(tokens, level)
        if bracketed is not None:
            return bracketed
    if tokens[0].kind is Kind.LETTER and is_wrapped(tokens[1:], "("):
        point = _bracketed(tokens[1:], level)
        if tokens[0].text.isupper() and tokens[0].text != "C" and point is not None:
            return point  # the label of a point: A(1,2)
    return read_quantity(tokens)


def _without_transposition(tokens: list[Token]) -> list[Token]:
    """(1, 2)^T without its mark: a column may be written as a tuple."""
    cut = next((i for i, token in enumerate(tokens) if token.is_(Kind.OPERATOR, "^")), 0)
    mark = [token.text for token in tokens[cut + 1 :] if token.text != "{"]
    is_tuple = cut and mark in (["T"], ["transpose"]) and is_wrapped(tokens[:cut], "(", "[")
    has_comma = is_tuple and split_at(tokens[1 : cut - 1], Kind.SEPARATOR, ",")[1]
    return tokens[:cut] if has_comma else tokens


def _number_set(tokens: Sequence[Token]) -> NumberSet | None:
    text = "".join(
        token.text for token in tokens if token.text not in ("{",) or token.kind is Kind.NAME
    )
    if tokens[0].is_(Kind.NAME, "mathbb", "reals"):
        plain = text.removeprefix("mathbb")
        return NumberSet("R" if plain == "reals" else plain)
    return None


def _bracketed(tokens: list[Token], level: int) -> Answer | None:
    """A tuple, interval or set, or None if the brackets hold one expression."""
    opening, closing = tokens[0], tokens[-1]
    inside = tokens[1:-1]
    if opening.text == r"\{":
        return read_set(inside, lambda part: read_answer(part, level + 1))
    parts, cuts = split_at(inside, Kind.SEPARATOR, ",", ";")
    if not cuts:
        return None
    if any(not part for part in parts):
        raise Unreadable("an element is missing")
    if opening.text == "[" and all(is_wrapped(part, "[") for part in parts):
        return Quantity(_nested_lists(parts))
    if opening.text == "{":
        return Sequence_(Order.SET, tuple(read_answer(part, level + 1) for part in parts))
    if len(parts) == 2 and (
        "[" in (opening.text, closing.text) or "]" in (opening.text, closing.text)
    ):
        low, high = (parse_expression(part) for part in parts)
        return Interval(low, high, opening.text == "[", closing.text == "[")
    if any(len(part) == 1 and part[0].kind is Kind.DOTS for part in parts):
        return _pattern(parts, level)
    return Sequence_(Order.TUPLE, tuple(read_answer(part, level + 1) for part in parts))


def _nested_lists(rows: list[list[Token]]) -> Node:
    """[[1,2],[3,4]] as a matrix."""
    cells = [split_at(row[1:-1], Kind.SEPARATOR, ",")[0] for row in rows]
    if len({len(row) for row in cells}) != 1:
        raise Unreadable("rows of a matrix differ in length")
    return Node(
        Op.MATRIX,
        tuple(Node(Op.MATRIX_ROW, tuple(parse_expression(c) for c in row)) for row in cells),
    )


def _colon(tokens: list[Token], terms: list[list[Token]], level: int) -> Answer:
    clock = read_clock(tokens)
    if all(term for term in terms):
        try:
            return Ratio(tuple(parse_expression(term) for term in terms), clock)
        except Unreadable:
            if len(terms) == 2 and all(token.kind is Kind.TEXT for token in terms[0]):
                name = words.plain_words(" ".join(token.text for token in terms[0]))
                value = read_answer(terms[1], level + 1)
                return Assignment(name, value, is_label=is_label(terms[0]))
    if clock is not None:
        return clock
    raise Unreadable("a colon that separates neither a ratio nor a name")


# words and mathematics mixed


def _phrase(tokens: Sequence[Token], level: int) -> Phrase | None:
    """Words with mathematics between them, or None if there are no words."""
    if not any(token.kind is Kind.TEXT for token in tokens) or len(tokens) > 120:
        return None
    parts: list[str | Answer] = []
    chunk: list[Token] = []
    for token in (*tokens, None):
        if token is not None and token.kind is not Kind.TEXT:
            chunk.append(token)
            continue
        if chunk:
            try:
                parts.append(read_answer(chunk, level + 3))
            except Unreadable:
                parts.append(" ".join(part.text for part in chunk))
            chunk = []
        if token is not None:
            is_unit = units.is_known(token.text)  # the case of its letters matters
            plain = units.canonical_unit if is_unit else words.plain_words
            parts.append(plain(token.text))
    if len(parts) > policy.MAX_ITEMS:
        raise TooBig("a long phrase")
    return Phrase(tuple(parts))
