"""Shapes with a notation of their own: units, bases, clock times and dates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from . import units, words
from .answers import Based, Clock, Date, Quantity
from .brackets import depths
from .name_tables import name_list, name_set
from .nodes import Node, Op, number
from .parser import parse_expression
from .result import Unreadable
from .tokens import CURRENCIES, Kind, Token

_UNIT_KINDS = frozenset((Kind.TEXT, Kind.LETTER, Kind.NUMBER, Kind.OPEN, Kind.CLOSE))
_TEMPERATURES = {"c": "celsius", "f": "fahrenheit", "celsius": "celsius",
                 "fahrenheit": "fahrenheit"}  # fmt: skip
_UNIT_OPERATORS = name_set("/ ^ * - % deg .")
_MAX_UNIT_WORDS = 6
_BASE_WORDS = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "twelve": 12,
    "sixteen": 16,
}


# quantities


def read_quantity(tokens: Sequence[Token]) -> Quantity:
    """An expression with a unit, a currency, a scale word or a percent sign, if it has one."""
    tokens, currency = _without_currency(with_inline_fractions(list(tokens)))
    tokens, temperature = _without_temperature(tokens)
    cut = _unit_start(tokens)
    if cut is None:
        return Quantity(parse_expression(tokens), temperature or currency)
    unit_text = _unit_text(tokens[cut:])
    scale, unit_text = _split_scale(unit_text)
    _refuse_claims(unit_text)
    node = parse_expression(tokens[:cut])
    if scale != 1:
        node = Node(Op.MULTIPLY, (node, number(scale)))
    if units.is_percent(unit_text):
        return Quantity(Node(Op.PERCENT, (node,)), currency)
    if units.is_degree(unit_text):
        return Quantity(node if node.op is Op.DEGREE else Node(Op.DEGREE, (node,)), currency)
    if not unit_text:
        return Quantity(node, currency)
    return Quantity(node, units.canonical_unit(unit_text), units.may_be_left_out(unit_text))


def with_inline_fractions(tokens: list[Token]) -> list[Token]:
    r"""\\frac{\\text{m}}{\\text{s}^2} after a number as m/s^2."""
    place = next((i for i, t in enumerate(tokens) if i and t.is_(Kind.NAME, "frac")), 0)
    inner = tokens[place + 2 : place + 3]
    if not place or not inner or not inner[0].quoted or inner[0].kind is Kind.NUMBER:
        return tokens
    rest = tokens[place + 1 :]
    ends = [i for i, level in enumerate(depths(rest)) if not level and rest[i].kind is Kind.CLOSE]
    if len(ends) != 2 or ends[1] != len(rest) - 1:
        return tokens
    slash = Token(Kind.OPERATOR, "/")
    return [*tokens[:place], *rest[1 : ends[0]], slash, *rest[ends[0] + 2 : ends[1]]]


def _refuse_claims(unit_text: str) -> None:
    """Raise Unreadable if the words after a number change its value or take it back."""
    spelled = unit_text.casefold().split()
    if any(
        word in words.HEDGES or word in words.NEGATIONS or word in words.CLAIMS for word in spelled
    ):
        raise Unreadable("words that hedge")
    if spelled[:1] in (["squared"], ["cubed"]) or len(spelled) > _MAX_UNIT_WORDS:
        raise Unreadable("words that are no unit")
    if any(words.number_from_words(word) is not None for word in spelled) or any(
        char.isdigit() for char in re.sub(r"\^\{?-?\d\}?", "", unit_text)
    ):
        raise Unreadable("a second number among the words")


def _without_temperature(tokens: list[Token]) -> tuple[list[Token], str]:
    r"""20^\circ C without its mark, and the name of the scale."""
    scale = _TEMPERATURES.get(tokens[-1].text.casefold(), "")
    if not scale or tokens[-1].kind not in (Kind.LETTER, Kind.TEXT):
        return tokens, ""
    rest = tokens[:-1]
    marks = [token.text for token in rest if token.text != "{"]
    if marks[-1:] != ["deg"]:
        return tokens, ""
    while rest and rest[-1].text in ("^", "deg", "{"):
        rest = rest[:-1]
    return (rest, scale) if rest else (tokens, "")


_SMALLER = {
    "week": ("day", 7), "day": ("h", 24), "h": ("min", 60), "min": ("s", 60),
    "yd": ("ft", 3), "ft": ("in", 12), "lb": ("oz", 16), "dollar": ("cent", 100),
    "km": ("m", 1000), "m": ("cm", 100), "kg": ("g", 1000),
}  # fmt: skip


def read_compound(tokens: Sequence[Token]) -> Quantity | None:
    """3 hours 45 minutes, 5 ft and 2 in: units in falling order; None for anything else.

    The value is in the last unit, and the name of the unit joins all of them.
    """
    if not 4 <= len(tokens) <= 8 or tokens[0].literal is None:
        return None
    if [token.text for token in tokens[1::2]] == ["'", "'"] and tokens[4:][0:1] == tokens[3:4]:
        feet, inches = tokens[0].literal, tokens[2].literal
        if len(tokens) == 5 and inches is not None:
            return Quantity(number(12 * feet.value + inches.value), "ft+in")
    rest = [token for token in tokens if not token.is_(Kind.SEPARATOR, "and", ",")]
    if len(rest) not in (4, 6) or any(token.literal is None for token in rest[::2]):
        return None
    if any(token.kind not in (Kind.TEXT, Kind.LETTER) for token in rest[1::2]):
        return None
    names = [units.canonical_unit(token.text) for token in rest[1::2]]
    total = Fraction(0)
    for place, (token, name) in enumerate(zip(rest[::2], names, strict=True)):
        if place:
            smaller, factor = _SMALLER.get(names[place - 1], ("", 0))
            if name != smaller:
                return None
            total *= factor
        assert token.literal is not None
        total += token.literal.value
    return Quantity(number(total), "+".join(names))


def _without_currency(tokens: list[Token]) -> tuple[list[Token], str]:
    for place in (0, -1):
        token = tokens[place] if len(tokens) > 1 else None
        if token is not None and token.kind is Kind.NAME and token.text in CURRENCIES:
            rest = tokens[1:] if place == 0 else tokens[:-1]
            return rest, token.text
    sign = tokens[0].text if tokens[0].is_(Kind.OPERATOR, "-", "+") else ""
    if sign and len(tokens) > 2 and tokens[1].kind is Kind.NAME and tokens[1].text in CURRENCIES:
        return [tokens[0], *tokens[2:]], tokens[1].text
    return tokens, ""


def _unit_start(tokens: Sequence[Token]) -> int | None:
    """Where the words at the end begin, or None if there are none."""
    first = next(
        (place for place, token in enumerate(tokens) if _is_unit_word(tokens, place)), None
    )
    if first is None or first == 0:
        return None
    tail = tokens[first:]
    if any(
        token.kind not in _UNIT_KINDS
        and not (token.kind is Kind.OPERATOR and token.text in _UNIT_OPERATORS)
        for token in tail
    ):
        return None
    before = tokens[first - 1]
    is_parenthesized = before.is_(Kind.OPEN, "(") and tail[-1].is_(Kind.CLOSE, "(")
    return first - 1 if is_parenthesized else first


def _is_unit_word(tokens: Sequence[Token], place: int) -> bool:
    token = tokens[place]
    if token.kind is Kind.TEXT:
        return True
    is_upright_letter = token.kind is Kind.LETTER and token.quoted and units.is_known(token.text)
    if is_upright_letter and token.text not in ("e", "i"):
        return True
    # 5 m/s without a text command: a letter alone would be a variable.
    if token.kind is not Kind.LETTER or not token.spaced or not place:
        return False
    spelled = "".join(after.text for after in tokens[place:] if after.text not in "{}")
    return spelled == "in" or spelled in ("m/s", "m/s^2", "ft/s", "m^2/s", "km/h", "g/mol")


def _unit_text(tokens: Sequence[Token]) -> str:
    text = ""
    for token in tokens:
        if token.text in ("(", ")") and token.kind in (Kind.OPEN, Kind.CLOSE):
            continue
        glue = " " if token.kind is Kind.TEXT or token.spaced else ""
        text += glue + (token.text if token.kind is not Kind.CLOSE else "}")
    return text.strip()


def _split_scale(text: str) -> tuple[int, str]:
    """Take scale words (million, 万) off the front of the words after a number."""
    scale = 1
    parts = text.split()
    while parts and parts[0].casefold() in words.SCALES:
        scale *= words.SCALES[parts.pop(0).casefold()]
    if parts and parts[0][:1] in words.SCALES and not parts[0].isascii():
        scale *= words.SCALES[parts[0][:1]]
        parts[0] = parts[0][1:]
    if parts and scale > 1 and parts[0].casefold() in ("of", "de", "d'"):
        parts = parts[1:]
    return scale, " ".join(part for part in parts if part)


# numbers in another base


def read_based(tokens: Sequence[Token]) -> Based | None:
    """1010_2, 2F_{16} or 1010_{\\text{two}}, or None."""
    cut = next((i for i, token in enumerate(tokens) if token.is_(Kind.OPERATOR, "_")), 0)
    if cut > 2 and tokens[0].is_(Kind.OPEN, "(") and tokens[cut - 1].is_(Kind.CLOSE, "("):
        tokens, cut = [*tokens[1 : cut - 1], *tokens[cut:]], cut - 2
    digits = "".join(token.text for token in tokens[:cut])
    if not digits or not digits.isalnum() or tokens[0].kind not in (Kind.NUMBER, Kind.LETTER):
        return None
    has_digit = any(token.kind is Kind.NUMBER for token in tokens[:cut])
    if len(digits) > 200 or (len(digits) < 2 and not has_digit):
        return None
    if not all(token.kind is Kind.NUMBER or token.text in "ABCDEF" for token in tokens[:cut]):
        return None
    script = [token for token in tokens[cut + 1 :] if token.kind not in (Kind.OPEN, Kind.CLOSE)]
    if len(script) != 1:
        return None
    text = script[0].text.casefold()
    base = int(text) if text.isdigit() and len(text) <= 2 else _BASE_WORDS.get(text, 0)
    if not 2 <= base <= 36 or (base != 16 and not has_digit):
        return None  # AB_2 is a name with an index
    return Based(digits, base)


# times and dates

_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*([ap])?\.?m?\.?", re.IGNORECASE)
_CLOCK_WORDS = name_set("am pm a.m. p.m. noon midnight uhr h o'clock hours")


_HALVES = {"am": "am", "pm": "pm", "midnight": "am", "noon": "pm"}


def read_clock(tokens: Sequence[Token]) -> Clock | None:
    """3:30, 15:30:00 or 3:30 PM, or None."""
    text = "".join(token.text for token in tokens if token.text not in ("{", "}"))
    match = re.match(r"(\d{1,2}):(\d{2})(?::(\d{2}))?(?![\d:])", text)
    if match is None:
        return None
    tail = re.sub(r"[^a-z]", "", text[match.end() :].casefold())
    if tail not in ("", "am", "pm", "uhr", "h", "oclock", "noon", "midnight", "hours"):
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    if hours > 24 or minutes > 59 or seconds > 59:
        return None
    half = _HALVES.get(tail, "")
    if tail in ("noon", "midnight") and (hours, minutes, seconds) != (12, 0, 0):
        return None
    if half and 1 <= hours <= 12:
        hours = hours % 12 + 12 * (half == "pm")
    return Clock(3600 * hours + 60 * minutes + seconds, half)


_MONTHS = {
    name: index % 12 + 1
    for index, name in enumerate(
        name_list(
            "january february march april may june july august september october november",
            "december janvier février mars avril mai juin juillet août septembre octobre novembre",
            "décembre enero febrero marzo abril mayo junio julio agosto septiembre octubre",
            "noviembre diciembre januar februar märz april mai juni juli august september oktober",
            "november dezember gennaio febbraio marzo aprile maggio giugno luglio agosto",
            "settembre ottobre novembre dicembre января февраля марта апреля мая июня июля",
            "августа сентября октября ноября декабря",
        )
    )
} | {
    name: index + 1
    for index, name in enumerate(name_list("jan feb mar apr may jun jul aug sep oct nov dec"))
}
_ISO = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})")


def read_date(text: str) -> Date | None:
    """2024-01-05, January 5, 2024, 5 January or July 4; None for anything else."""
    if (iso := _ISO.fullmatch(text.strip())) is not None:
        return Date(*map(int, iso.groups()))
    parts = re.findall(r"[^\W\d_]+|\d+", text.casefold())
    names = [part for part in parts if part in _MONTHS]
    numbers = [
        int(part)
        for part in re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", text).replace(",", " ").split()
        if part.isdigit()
    ]
    others = (
        {part for part in parts if not part.isdigit()}
        - set(names)
        - {"st", "nd", "rd", "th", "of", "de", "the"}
    )
    if len(names) != 1 or others or not 1 <= len(numbers) <= 2:
        return None
    days = [value for value in numbers if value <= 31]
    years = [value for value in numbers if value > 31]
    if len(days) != 1 or len(years) > 1:
        return None
    return Date(years[0] if years else 0, _MONTHS[names[0]], days[0])
