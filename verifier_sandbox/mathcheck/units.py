"""Units of measure and of count: one canonical spelling for each."""

from __future__ import annotations

import re

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
    "rupee": "rupees inr rs", "hz": "hertz", "n": "newton newtons", "j": "joule joules",
    "w": "watt watts", "v": "volt volts", "a": "ampere amperes amp amps", "pa": "pascal pascals",
    "mol": "mole moles", "k": "kelvin kelvins",
    "celsius": "°c", "ohm": "ohms", "kwh": "", "kw": "", "kj": "", "kpa": "", "khz": "", "mhz": "",
}  # fmt: skip
_CANONICAL = {alias: name for name, words in _ALIASES.items() for alias in words.split()} | {
    name: name for name in _ALIASES
}


_COUNTS = name_set(
    "unit units u way ways solution solutions possibility possibilities item items time",
    "times value values integer integers number numbers pair pairs total piece pieces",
    "square squared unité unités unidades einheiten einheit unità единиц 个 种 次 способов",
)
"""Words that count nothing in particular: with one of them a number has no unit."""

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
    | _PERCENT - {"%"}
)
"""Units that are read without a text command; `m` or `g` alone would be a variable."""

_PERCENT_PHRASES = frozenset(("per cent", "pour cent", "por ciento", "per cento"))
_POWER_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
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
    """Whether every factor of the unit is in the table."""
    factors = _factors(text)
    return factors is not None and all(name in _ALIASES for name, _ in factors)


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
    return "*".join(
        f"{name}^{power}" if power != 1 else name for name, power in sorted(total.items()) if power
    )


def _factors(text: str) -> list[tuple[str, int]] | None:
    """Base units and their powers, or None if the text has no unit grammar."""
    plain = text.casefold().replace("·", " ").replace("*", " ").replace("⋅", " ").strip(" .")
    for mark, power in _POWERS.items():
        plain = plain.replace(mark, f"^{power}")
    plain = re.sub(r"\b(?:per|pro|por|par|al|в)\b", "/", plain)
    factors: list[tuple[str, int]] = []
    sign = 1
    next_power = 1
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
        position = match.end()
        if word in _POWER_WORDS:
            if word.endswith("ed") and factors:
                name, old = factors[-1]
                factors[-1] = (name, old * _POWER_WORDS[word])
            else:
                next_power = _POWER_WORDS[word]
            continue
        if word in _COUNTS or word in ("of", "in"):
            continue
        power *= sign * next_power
        factors += [(base, power * own) for base, own in _COMPOUND.get(word, ((_base(word), 1),))]
        next_power = 1
    return factors


def _base(word: str) -> str:
    if word in _CANONICAL:
        return _CANONICAL[word]
    if word.endswith("s") and not word.endswith("ss") and len(word) > 3:
        return word[:-1]
    return word
