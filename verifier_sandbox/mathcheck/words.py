"""Words in answers, in English, French, Spanish, Italian, German, Russian and Chinese.

Tables only, and the two functions that read numbers from words. All keys are in lower case.
"""

from __future__ import annotations

from fractions import Fraction

from .name_tables import name_list, name_set

AND = name_set("and et y e und и и также 和 与 及 以及 并且 و & та i") - {"i", "та"}
OR = name_set("or ou o u oder или либо 或 或者 либо")
ONLY_QUOTED = name_set("e o u y i")
"""Connectors that are also variables: they count only inside a text command between spaces."""

NEGATIONS = name_set(
    "not no never without except non pas ne kein keine nicht nie не нет кроме 不 不是 非 没有"
)
HEDGES = name_set(
    "plus minus divided multiplied factorial more less greater fewer least most",
    "between under over above below nearly almost roughly around some any every other another",
    "if when unless maybe perhaps possibly either probably but where for otherwise else",
    "then given provided assuming except versus vs than instead si wenn falls se если",
    "cuando quando peut-être vielleicht quizás forse возможно 如果 当 若 可能 也许 其中",
)

CLAIMS = name_set(
    "half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh",
    "sevenths eighth eighths ninth ninths tenth tenths twelfth twelfths hundredth hundredths",
    "thousandth thousandths millionth millionths double doubled doubles triple tripled thrice",
    "twice wrong false incorrect true right correct negative score is are was isn't aren't be",
    "demi moitié tiers doble triple mitad tercio tercios doppio metà hälfte falso faux falsch",
)
"""Words after a number that change its value or say something about it."""

LEADING = (
    "the final answer is", "final answer is", "final answer", "the answer is", "the answer",
    "answer is", "answer", "ans", "therefore", "thus", "hence", "so", "result", "the result is",
    "the value is", "value", "exactly", "approximately", "about", "approx", "is", "equals",
    "option", "choice", "réponse", "la réponse est", "la réponse finale est", "le résultat est",
    "el resultado es", "il risultato è", "das ergebnis ist", "respuesta",
    "la respuesta es",
    "risposta", "la risposta è", "antwort", "die antwort ist", "die antwort lautet", "ответ",
    "答案", "答案是", "答案为", "结果是", "结果为", "答", "最终答案", "最终答案是", "等于",
    "选", "选项", "故选", "所以", "因此", "donc", "also", "por lo tanto", "quindi", "итак",
    "получаем",
)  # fmt: skip

ARTICLES = name_set("a an the le la les un une el los las una il lo gli der die das ein eine")

INFINITY = name_set("infinity infinite inf infini infinito unendlich бесконечность 无穷 无穷大")
EMPTY_SET = frozenset(
    (
        "no solution", "no solutions", "no real solution", "no real solutions", "none", "empty set",
        "the empty set", "empty", "no such numbers", "aucune solution", "pas de solution",
        "sin solución", "no hay solución", "nessuna soluzione", "keine lösung", "leere menge",
        "нет решений", "нет решения", "пустое множество", "无解", "空集", "there are no solutions",
        "no solution exists", "there is no solution", "there is no real solution",
        "there are no real solutions", "there exists no solution", "equation has no solution",
        "equation has no solutions", "equation has no real solutions", "system has no solution",
        "es gibt keine lösung", "il n'y a pas de solution", "non ci sono soluzioni",
        "no existe solución", "решений нет", "方程无解", "does not have a solution",
    )
)  # fmt: skip
UNDEFINED = frozenset(
    (
        "undefined", "does not exist", "dne", "not defined", "doesn't exist", "it does not exist",
        "limit does not exist", "limit doesn't exist", "this limit does not exist",
        "it is undefined", "is undefined", "expression is undefined",
    )
)  # fmt: skip
ALL_REALS = frozenset(
    ("all real numbers", "all reals", "all real x", "the real numbers", "real numbers", "全体实数")
)

# Short answers whose translations mean the same, because prompts are translated and references not.
SYNONYMS = {
    word: group.split()[0]
    for group in (
        "yes oui sí sì si ja да 是 是的 对",
        "no non nein нет 否 不是",
        "true vrai verdadero vero wahr верно истина 真 正确",
        "false faux falso falsch неверно ложь 假 错误",
        "even pair par pari gerade чётное четное чётная четная 偶数",
        "odd impair impar dispari ungerade нечётное нечетное нечётная нечетная 奇数",
    )
    for word in group.split()
}

_UNITS_EN = name_list(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen",
    "fourteen fifteen sixteen seventeen eighteen nineteen",
)
_TENS_EN = name_list("twenty thirty forty fifty sixty seventy eighty ninety")
_SMALL = (
    _UNITS_EN,
    name_list(
        "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze",
        "quinze seize",
    ),
    name_list(
        "cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce",
        "quince",
    ),
    name_list("zero uno due tre quattro cinque sei sette otto nove dieci undici dodici"),
    name_list("null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf"),
    name_list(
        "ноль один два три четыре пять шесть семь восемь девять десять одиннадцать двенадцать"
    ),
)
_NUMBER_WORDS = {word: value for table in _SMALL for value, word in enumerate(table)}
_NUMBER_WORDS |= {word: 10 * tens for tens, word in enumerate(_TENS_EN, start=2)}

SCALES = {
    word: 10**exponent
    for exponent, words in {
        3: "thousand thousands mille mil mila tausend тысяча тысячи тысяч 千",
        4: "万 萬",
        6: "million millions millón millones milione milioni millionen миллион миллиона миллионов "
        "百万",
        8: "亿",
        9: "billion billions milliard milliards milliarde milliarden miliardo miliardi миллиард "
        "миллиарда миллиардов 十亿",
        12: "trillion trillions",
        2: "hundred hundreds",
        5: "lakh lakhs",
        7: "crore crores",
    }.items()
    for word in words.split()
} | {"dozen": 12, "dozens": 12}

MAX_NUMBER_WORDS = 12

_SINGULAR = {
    word: denominator
    for denominator, word in enumerate(
        name_list("half third quarter fifth sixth seventh eighth ninth tenth"), start=2
    )
} | {"fourth": 4}
_DENOMINATORS = _SINGULAR | {f"{word}s": value for word, value in _SINGULAR.items()} | {"halves": 2}

_HAN_DIGITS = dict(
    zip("零〇一二三四五六七八九两", (0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 2), strict=True)
)
_HAN_SCALES = {"十": 10, "百": 100, "千": 1000}
_HAN_GROUPS = {"万": 10**4, "亿": 10**8}


def number_from_words(text: str) -> int | None:
    """The integer that the words name (five, twenty-one, two hundred, 十二), or None."""
    words = text.casefold().replace("-", " ").split()
    if not words or len(words) > MAX_NUMBER_WORDS:
        return None
    if len(words) == 1 and all(
        char in _HAN_DIGITS or char in _HAN_SCALES or char in _HAN_GROUPS for char in words[0]
    ):
        return _number_from_han(words[0])
    total = group = 0
    seen = False
    for word in words:
        if word == "and" and seen:
            continue
        if word in _NUMBER_WORDS:
            group += _NUMBER_WORDS[word]
        elif word == "hundred" and seen:
            group *= 100
        elif word in SCALES and seen:
            total, group = total + group * SCALES[word], 0
        else:
            return None
        seen = True
    return total + group


def fraction_from_words(text: str) -> Fraction | None:
    """The fraction that the words name (one half, three quarters, 2 thirds), or None."""
    words = text.casefold().replace("-", " ").split()
    if not words or words[-1] not in _DENOMINATORS:
        return None
    above = "one" if words[:-1] == ["a"] else " ".join(words[:-1])
    value = number_from_words(above)
    return None if value is None else Fraction(value, _DENOMINATORS[words[-1]])


def _number_from_han(text: str) -> int | None:
    if all(char in _HAN_DIGITS for char in text) and len(text) > 1:
        return int("".join(str(_HAN_DIGITS[char]) for char in text))
    total = group = 0
    digit: int | None = None
    for char in text:
        if char in _HAN_DIGITS:
            digit = _HAN_DIGITS[char]
        elif char in _HAN_SCALES:
            group += (1 if digit is None else digit) * _HAN_SCALES[char]
            digit = None
        else:
            if not total and not group and digit is None:
                return None  # 万 alone scales a number before it
            total, group = (total + group + (digit or 0)) * _HAN_GROUPS[char], 0
            digit = None
    return total + group + (digit or 0)


def plain_words(text: str) -> str:
    """Words without case, articles, quotes, and outer punctuation; synonyms made one."""
    words = text.casefold().replace("’", "'").strip(" \t\n.!?:;\"'()").split()
    if len(words) > 1:
        words = [word for word in words if word not in ARTICLES] or words
    plain = " ".join(words)
    return SYNONYMS.get(plain, plain)
