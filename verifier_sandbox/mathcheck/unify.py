"""Text unification: one spelling for the many Unicode forms of the same mathematics.

The result is LaTeX in ASCII plus letters of other scripts; spaces are kept, because `1 000` is a
number and `1 0` is not. Superscripts and vulgar fractions are rewritten before NFKC, which would
turn x² into x2.
"""

from __future__ import annotations

import re
import unicodedata

from .name_tables import name_list

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₒₓₙₘₖᵢⱼ", "0123456789+-=()aeoxnmkij", strict=True))

_GREEK = {
    **dict(
        zip(
            "αβγδεζηθικλμνξπρστυφχψω",
            name_list(
                "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho",
                "sigma tau upsilon phi chi psi omega",
            ),
            strict=True,
        )
    ),
    **dict(
        zip(
            "ΓΔΘΛΞΠΣΦΨΩ",
            name_list("Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"),
            strict=True,
        )
    ),
    "ϕ": "phi",
    "ϵ": "epsilon",
    "ϑ": "theta",
    "ς": "sigma",
}

_COMMANDS = {
    "×": "times", "✕": "times", "✖": "times", "÷": "div", "·": "cdot", "⋅": "cdot", "∙": "cdot",
    "•": "cdot", "∗": "cdot", "∞": "infty", "≤": "le", "⩽": "le", "≦": "le", "≥": "ge", "⩾": "ge",
    "≧": "ge", "≠": "ne", "≈": "approx", "≃": "approx", "≅": "approx", "≡": "equiv", "∪": "cup",
    "∩": "cap", "∖": "setminus", "∅": "emptyset", "∈": "in", "∉": "notin", "±": "pm", "∓": "mp",
    "√": "sqrt", "∑": "sum", "∏": "prod", "∫": "int", "⌊": "lfloor", "⌋": "rfloor", "⌈": "lceil",
    "⌉": "rceil", "⟨": "langle", "⟩": "rangle", "〈": "langle", "〉": "rangle", "…": "ldots",
    "⋯": "ldots", "→": "to", "∠": "angle", "△": "triangle", "∀": "forall", "∃": "exists",
    "∧": "wedge", "∨": "vee", "⇒": "Rightarrow", "⇔": "Leftrightarrow", "∂": "partial",
    "ℓ": "ell", "∥": "parallel", "⊥": "perp",
}  # fmt: skip

_LITERAL = {
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}", "°": r"^{\circ}", "˚": r"^{\circ}", "º": r"^{\circ}", "℃": r"^{\circ}C",
    "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-",
    "‒": "-", "﹣": "-", "－": "-", "′": "'", "’": "'", "‘": "'", "″": "''", "“": '"', "”": '"',
    "∶": ":", "：": ":", "、": ",", "，": ",", "。": ".", "；": ";", "｡": ".", "٫": ".", "٬": ",",
    "،": ",", "∣": "|", "｜": "|", "⁄": "/", "∕": "/", "【": "[", "】": "]", "「": "", "」": "",
    "€": r"\euro ", "£": r"\pounds ", "¥": r"\yen ", "￥": r"\yen ", "₽": r"\ruble ",
    "₹": r"\rupee ", "％": "%", "≪": "<", "≫": ">", "＜": "<", "＞": ">",
}  # fmt: skip

_REPLACEMENT: dict[str, str] = (
    {char: f"\\{name} " for char, name in _GREEK.items()}
    | {char: f"\\{name} " for char, name in _COMMANDS.items()}
    | _LITERAL
)

_SCRIPT_RUN = re.compile(
    f"(?P<up>[{''.join(_SUPERSCRIPTS)}]+)|(?P<down>[{''.join(_SUBSCRIPTS)}]+)".replace("-", r"\-")
)
_ROOT_OF_NUMBER = re.compile(r"√\s?(\d+(?:\.\d+)?|[a-z](?![a-z]))")
_PRIMES = re.compile(r"\^ ?(?:\{ ?((?:\\prime ?){1,3})\}|(\\prime))")
_BRACED_SIGN = re.compile(r"\{([:=<>+-])\}")
_TIGHT_COMMA = re.compile(r"(?<=\d),\s?\\!\s?(?=\d{3}(?!\d))")  # of thousands: 10,\!000
_MARKDOWN_BOLD = re.compile(r"\s*(\*\*|__)(?=[^*_])(.*[^*_])\1\s*", re.DOTALL)


def unify(text: str) -> str:
    """Rewrite Unicode mathematics as LaTeX. Linear in the length of the text."""
    if r"\!" in text:
        text = _TIGHT_COMMA.sub("{,}", text)
    text = _BRACED_SIGN.sub(r"\1", _PRIMES.sub(_as_primes, text))
    if text.isascii():
        return _strip_emphasis(text)
    text = _SCRIPT_RUN.sub(_script, text)
    text = _ROOT_OF_NUMBER.sub(r"\\sqrt{\1}", text)
    return _strip_emphasis("".join(_unify_char(char) for char in text))


def _strip_emphasis(text: str) -> str:
    bold = _MARKDOWN_BOLD.fullmatch(text)
    return bold.group(2) if bold else text


def _as_primes(match: re.Match[str]) -> str:
    return "'" * match.group().count("prime")


def _script(match: re.Match[str]) -> str:
    if up := match.group("up"):
        return "^{" + "".join(_SUPERSCRIPTS[char] for char in up) + "}"
    return "_{" + "".join(_SUBSCRIPTS[char] for char in match.group("down")) + "}"


def _unify_char(char: str) -> str:
    if char.isascii():
        return char
    if (replacement := _REPLACEMENT.get(char)) is not None:
        return replacement
    if unicodedata.category(char) == "Cf":  # zero-width marks, byte order mark, direction marks
        return ""
    if (digit := unicodedata.decimal(char, None)) is not None:
        return str(digit)
    plain = unicodedata.normalize("NFKC", char)
    if "⁄" in plain:  # a vulgar fraction such as ⅓
        numerator, _, denominator = plain.partition("⁄")
        return f"\\frac{{{numerator}}}{{{denominator or '1'}}}"
    if plain != char and len(plain) <= 4:
        return "".join(_REPLACEMENT.get(part, part) for part in plain)
    return " " if char.isspace() else char
