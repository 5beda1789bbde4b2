"""Units of measure and of count: one canonical spelling for each."""

from __future__ import annotations

import re

from . import nouns
from .name_tables import name_set

_ALIASES = {
    "mm": "millimeter millimeters millimetre millimetres миллиметр мм 毫米 millimètre millimètres",
    "cm": "centimeter centimeters centimetre centimetres сантиметр сантиметров см 厘米 centimètre "
    "centimètres centímetro centímetros centimetro centimetri zentimeter",
    "dm": "decimeter decimeters decimetre дециметр дм 分米",
    "m": "meter meters metre metres метр метра метров м 米 mètre mètres metro metros metri",
    "km": "kilometer kilometers kilometre kilometres километр километра километров км 千米 公里 "
    "kilomètre kilomètres kilómetro kilómetros chilometro chilometri",
    "in": "inch inches", "ft": "foot feet", "yd": "yard yards", "mi": "mile miles",
    "mg": "milligram milligrams мг 毫克", "g": "gram grams gramme grammes грамм граммов г 克",
    "kg": "kilogram kilograms kilogramm kilo kilos килограмм килограммов кг 千克 公斤",
    "t": "ton tons tonne tonnes тонна тонн т 吨", "lb": "lbs pound pounds", "oz": "ounce ounces",
    "ml": "milliliter milliliters millilitre мл 毫升", "l": "liter liters litre litres литр литров "
    "л 升 litro litros litri", "gal": "gallon gallons",
    "ms": "millisecond milliseconds", "s": "sec secs second seconds seconde secondes segundo "
    "segundos secondo secondi sekunde sekunden секунда секунд секунды с 秒",
    "min": "mins minute minutes minuto minutos minuti minuten минута минут минуты мин 分钟",
    "h": "hr hrs hour hours heure heures hora horas ora ore stunde stunden час часа часов ч 小时",
    "day": "days d jour jours día días giorno giorni tag tage tagen день дня дней 天 日",
    "week": "weeks semaine semaines semana semanas settimana settimane woche wochen неделя недели "
    "недель 周 星期",
    "month": "months mois mes meses mese mesi monat monate месяц месяца месяцев 个月 月",
    "year": "years yr yrs an ans année années año años anno anni jahr jahre jahren год года лет 年 "
    "岁",
    "degree": "degrees deg degré degrés grado grados gradi grad градус градуса градусов 度",
    "radian": "radians rad rads 弧度", "dollar": "dollars usd bucks 美元", "cent": "cents ¢",
    "euro": "euros eur евро 欧元", "pound sterling": "gbp quid 英镑",
    "yuan": "rmb cny 元 块", "yen": "jpy 日元",
    "rouble": "ruble rubles rubel рубль рубля рублей руб",
    "rupee": "rupees inr rs", "celsius": "°c centigrade", "fahrenheit": "°f", "Hz": "hz",
    "kW": "kw", "kWh": "kwh", "kJ": "kj", "kPa": "kpa", "kHz": "khz", "MHz": "mhz", "GHz": "ghz",
    "kN": "kn", "kV": "kv", "Pa": "pa", "ohm": "ohms", "acre": "acres",
    "hectare": "hectares ha", "knot": "knots", "K": "kelvin kelvins",
}  # fmt: skip
_PREFIXES = {"n": "nano", "m": "milli", "c": "centi", "d": "deci", "k": "kilo", "M": "mega",
             "G": "giga", "T": "tera"}  # fmt: skip
_SYMBOLS = {
    "m": "meter metre", "g": "gram", "s": "second", "W": "watt", "J": "joule", "V": "volt",
    "A": "ampere amp", "Pa": "pascal", "N": "newton", "Hz": "hertz", "l": "liter litre",
    "mol": "mole", "eV": "electronvolt", "B": "byte", "bit": "bit", "Wh": "watthour",
    "cal": "calorie",
}  # fmt: skip
_SPELLINGS = {
    prefix + symbol: prefix + symbol for prefix in ("", *_PREFIXES) for symbol in _SYMBOLS
} | {prefix + "L": prefix + "l" for prefix in ("", *_PREFIXES)}
"""Symbols whose letters tell them apart: mW is not MW."""
_CANONICAL = {
    prefix_name + name + plural: prefix + symbol
    for prefix, prefix_name in (("", ""), *_PREFIXES.items())
    for symbol, names in _SYMBOLS.items()
    for name in names.split()
    for plural in ("", "s")
} | {alias: name for name, words in _ALIASES.items() for alias in (name.casefold(), *words.split())}
_NAMES = frozenset(_CANONICAL.values()) | frozenset(_SPELLINGS.values())
_ONE_LETTER = name_set("t h d")


_COMPOUND = {
    name: factors
    for names, factors in {
        "mph": (("mi", 1), ("h", -1)),
        "kph kmh kmph": (("km", 1), ("h", -1)),
        "cc": (("cm", 3),),
        "sqft": (("ft", 2),),
    }.items()
    for name in names.split()
}
_PERCENT = name_set(
    "% percent percents per-cent pct percentage prozent pourcent pourcents porcentaje",
    "percento процент процента процентов",
)
BARE = (
    frozenset(alias for alias in _CANONICAL if len(alias) > 2 or not alias.isascii())
    | name_set("cm mm km kg ml mg ft hr")
    | frozenset(_COMPOUND)
    | _PERCENT - {"%"}
)
"""Units that are read without a text command; `m` or `g` alone would be a variable."""

_PERCENT_PHRASES = frozenset(("per cent", "pour cent", "por ciento", "per cento"))
_POWERS_BEFORE = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3}
_PER = re.compile(r"\b(?:per|pro|por|par|al|в)\b", re.IGNORECASE)
_POWERS = {"²": 2, "³": 3}
_FACTOR = re.compile(r"([^\W\d_]+|[%°¢][^\W\d_]*)\s*(?:\^?\s*\{?\s*(-?\d)\s*\}?)?", re.UNICODE)


def is_percent(text: str) -> bool:
    """Whether the words mean percent."""
    plain = text.casefold().strip(" .")
    return plain in _PERCENT or plain in _PERCENT_PHRASES


def is_degree(text: str) -> bool:
    """Whether the words mean degrees of an angle."""
    return canonical_unit(text) == "degree"


def is_known(text: str) -> bool:
    """Whether every factor of the unit is in the tables."""
    factors = _factors(text)
    return factors is not None and all(name in _NAMES for name, _ in factors)


def may_be_left_out(text: str) -> bool:
    """Whether the words after a number are units and what is counted, and say nothing else."""
    factors = _factors(text)
    return factors is not None and all(
        name in _NAMES or nouns.is_noun(name) or name in nouns.FILLERS for name, _ in factors
    )


def canonical_unit(text: str) -> str:
    """One spelling for a unit: `m/s^2`, `m s^{-2}` and `meters per second squared` agree.

    The empty string means that the words name no unit (ways, units). Unknown words come back
    singular and in lower case, so that dogs equal dog and do not equal cats.
    """
    factors = _factors(text)
    if factors is None:
        return " ".join(text.casefold().split())
    total: dict[str, int] = {}
    for name, power in factors:
        total[name] = total.get(name, 0) + power
    if "celsius" in total or "fahrenheit" in total:
        total.pop("degree", None)
    return "*".join(
        f"{name}^{power}" if power != 1 else name for name, power in sorted(total.items()) if power
    )


def _factors(text: str) -> list[tuple[str, int]] | None:
    """Base units and their powers, or None if the text has no unit grammar."""
    plain = text.replace("·", " ").replace("*", " ").replace("⋅", " ").strip(" .")
    for mark, power in _POWERS.items():
        plain = plain.replace(mark, f"^{power}")
    plain = _PER.sub("/", plain)
    factors: list[tuple[str, int]] = []
    sign = 1
    next_power = 1
    is_count = False
    position = 0
    while position < len(plain):
        if plain[position] in " .()-":
            position += 1
            continue
        if plain[position] == "/":
            sign, position = -1, position + 1
            continue
        match = _FACTOR.match(plain, position)
        if match is None:
            return None
        word, power = match.group(1), int(match.group(2) or 1)
        folded = word.casefold()
        position = match.end()
        if folded in _POWERS_AFTER:
            if not factors and not is_count:
                return None  # 5 squared is 25
            if factors:
                name, old = factors[-1]
                factors[-1] = (name, old * _POWERS_AFTER[folded])
            continue
        if folded in _POWERS_BEFORE:
            next_power = _POWERS_BEFORE[folded]
            continue
        if is_count := (
            folded in nouns.COUNTS or _is_preposition(plain, match) or _ends(plain, match)
        ):
            next_power = 1
            continue
        power *= sign * next_power
        factors += [(base, power * own) for base, own in _COMPOUND.get(folded, ((_base(word), 1),))]
        next_power = 1
    return factors if next_power == 1 else None


def _is_preposition(text: str, match: re.Match[str]) -> bool:
    """Whether it is "of", or "in" before another word: 5 ways in total, but 5 in and 5 cubic in."""
    word = match.group(1).casefold()
    return word == "of" or (word == "in" and text[match.end() :].strip()[:1].isalpha())


def _ends(text: str, match: re.Match[str]) -> bool:
    """Whether it is the word "times" at the end: 5 times, but not 5 times x."""
    return match.group(1).casefold() in ("time", "times") and match.end() == len(text)


def _base(word: str) -> str:
    folded = word.casefold()
    if word in _SPELLINGS:
        return _SPELLINGS[word]
    if folded in _CANONICAL and (len(word) > 1 or word in _ONE_LETTER or not word.isascii()):
        return _CANONICAL[folded]
    if len(word) == 1:
        return word
    if folded.endswith("s") and not folded.endswith("ss") and len(folded) > 3:
        return folded[:-1]
    return folded
