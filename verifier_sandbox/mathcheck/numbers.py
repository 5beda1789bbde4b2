"""Number literals as people write them: thousands marks, decimal commas, exponents, periods."""

from __future__ import annotations

import re
from enum import Enum
from fractions import Fraction

from . import policy
from .nodes import Literal
from .result import TooBig


class CommaRule(Enum):
    """How a comma between digits is read. A text may be read by more than one rule."""

    DEFAULT = "default"  # thousands outside brackets, separator inside
    SEPARATOR = "separator"  # always a separator
    THOUSANDS = "thousands"  # thousands inside brackets too
    DECIMAL = "decimal"  # a decimal mark


# Spaces and apostrophes group thousands everywhere; so does {,} with groups of three.
_GROUP_MARK = r"(?:\{,\}|\\[,;: !]|~| |')"
_GROUPED = rf"[1-9]\d{{0,2}}(?:{_GROUP_MARK}{{1,2}}\d{{3}})+(?![\d])(?:\.\d+)?"
_GERMAN = r"[1-9]\d{0,2}(?:\.\d{3})+(?:(?:,|\{,\})\d+(?!\d*,)|(?<=\d\.\d{3}\.\d{3}))(?!\d)"
_COMMAS = r"[1-9]\d{0,2}(?:(?:,|\{,\})\d{3})+(?![\d])(?:\.\d+)?"
_BRACED_DECIMAL = r"\d+\{,\}\d+"
_GROUPED_COMMA = rf"[1-9]\d{{0,2}}(?:{_GROUP_MARK}\d{{3}})+,\d+"
_COMMA_DECIMAL = r"\d+(?:,|\{,\})\d+"
_PLAIN = r"\d+(?:\.\d+)?|\.\d+"
_EXPONENT = r"(?:[eE](?P<exponent>[+-]?\d{1,9})(?![\d.a-zA-Z]))?"
_PERIOD = (
    r"(?:\\(?:overline|bar|dot)\s*\{(?P<bar>\d{1,40})\}|\((?P<round>\d{1,40})\)(?=$|[^\d(^]))?"
)


def _pattern(*forms: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<digits>{'|'.join(forms)}){_EXPONENT}")


_PATTERNS = {
    (CommaRule.DEFAULT, False): _pattern(_COMMAS, _GERMAN, _GROUPED, _BRACED_DECIMAL, _PLAIN),
    (CommaRule.DEFAULT, True): _pattern(_GROUPED, _BRACED_DECIMAL, _PLAIN),
    (CommaRule.SEPARATOR, False): _pattern(_GROUPED, _BRACED_DECIMAL, _PLAIN),
    (CommaRule.SEPARATOR, True): _pattern(_GROUPED, _BRACED_DECIMAL, _PLAIN),
    (CommaRule.THOUSANDS, False): _pattern(_COMMAS, _GROUPED, _BRACED_DECIMAL, _PLAIN),
    (CommaRule.THOUSANDS, True): _pattern(_COMMAS, _GROUPED, _BRACED_DECIMAL, _PLAIN),
    (CommaRule.DECIMAL, False): _pattern(_GERMAN, _GROUPED_COMMA, _COMMA_DECIMAL, _GROUPED, _PLAIN),
    (CommaRule.DECIMAL, True): _pattern(_GERMAN, _GROUPED_COMMA, _COMMA_DECIMAL, _GROUPED, _PLAIN),
}
_REPEATING = re.compile(rf"(?P<whole>\d*)\.(?P<fixed>\d*){_PERIOD}")
_DOTS_AFTER = re.compile(r"\s*(?:\\ldots|\\dots|\\cdots|\.\.\.)")
AMBIGUOUS_GROUP = re.compile(r"\d(?:,|\{,\})\d{3}(?!\d)")
"""A comma that could group thousands or separate."""
AMBIGUOUS_COMMA = re.compile(r"\d(?:,|\{,\})\d")
"""A comma that could be a decimal mark or separate."""


def scan_number(
    text: str, position: int, rule: CommaRule, *, bracketed: bool
) -> tuple[Literal, int] | None:
    """The number literal that starts here and where it ends, or None.

    Raises TooBig when the literal has more than `policy.MAX_LITERAL_DIGITS` digits.
    """
    if (repeating := _scan_repeating(text, position)) is not None:
        return repeating
    match = _PATTERNS[rule, bracketed].match(text, position)
    if match is None:
        return None
    raw = match.group("digits")
    if len(raw) > policy.MAX_LITERAL_DIGITS:
        raise TooBig(f"a number of {len(raw)} characters")
    return _literal(_without_marks(raw), match.group("exponent")), match.end()


def _without_marks(raw: str) -> str:
    """Digits with at most one decimal point."""
    bare = re.sub(r"\\[,;: !]|[ ~']", "", raw).replace("{,}", ",")
    if "." in bare and "," in bare:
        decimal_mark = max(bare.rindex("."), bare.rindex(","))
        return re.sub(r"[.,]", "", bare[:decimal_mark]) + "." + bare[decimal_mark + 1 :]
    if bare.count(".") > 1:
        return bare.replace(".", "")
    if "," in bare:
        if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", bare):
            return bare.replace(",", "")
        return bare.replace(",", ".")
    return bare


def _literal(digits: str, exponent: str | None) -> Literal:
    whole, point, decimals = digits.partition(".")
    value = Fraction(int((whole + decimals) or "0"), 10 ** len(decimals))
    num_decimals: int | None = len(decimals) if point else None
    if exponent is not None:
        if abs(int(exponent)) > policy.MAX_LITERAL_DIGITS:
            raise TooBig(f"a decimal exponent of {exponent}")
        value *= Fraction(10) ** int(exponent)
        num_decimals = max(0, len(decimals) - int(exponent))
    significant = len((whole + decimals).lstrip("0"))
    return Literal(value, num_decimals, significant, digits)


def _scan_repeating(text: str, position: int) -> tuple[Literal, int] | None:
    """A decimal with a period: 0.1\\overline{6}, 0.(3), 0.333..."""
    match = _REPEATING.match(text, position)
    if match is None or len(match.group()) > policy.MAX_LITERAL_DIGITS:
        return None
    whole, fixed = match.group("whole"), match.group("fixed")
    period = match.group("bar") or match.group("round")
    end = match.end()
    if period is None:
        dots = _DOTS_AFTER.match(text, end)
        if dots is None or len(fixed) < 3 or len(set(fixed[-3:])) > 1:
            return None
        period, end = fixed[-1], dots.end()
    base = Fraction(int((whole + fixed) or "0"), 10 ** len(fixed))
    tail = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    return Literal(base + tail, None, 0, text[position:end]), end
