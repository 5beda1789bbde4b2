"""Words before a colon or an equals sign that only say what the value is of: area, answer, sum.

A closed list, as for the words after a number: "twice the answer = 12" and "not: 5" are no labels.
"""

from __future__ import annotations

from . import words
from .name_tables import name_set
from .nouns import COUNTS, is_noun

_LABELS = name_set(
    # English
    "answer answers ans solution solutions result value values final correct is are equals total",
    "sum difference product quotient remainder ratio average mean median mode maximum minimum",
    "area length width height depth perimeter circumference volume surface radius diameter slope",
    "probability chance number numbers count amount quantity distance speed velocity acceleration",
    "rate time duration age weight mass cost price profit loss income salary temperature score",
    "domain range limit determinant expected common",
    # French, Spanish, Italian
    "réponse résultat valeur finale aire longueur largeur hauteur périmètre probabilité nombre",
    "vitesse temps durée coût prix somme différence produit quotient âge",
    "respuesta resultado valor área longitud ancho altura perímetro volumen probabilidad número",
    "distancia velocidad tiempo costo coste precio suma diferencia producto cociente edad",
    "risposta risultato valore lunghezza larghezza altezza perimetro probabilità numero distanza",
    "velocità tempo costo prezzo somma differenza prodotto quoziente totale età est es è",
    # German, Russian, Chinese
    "antwort ergebnis lösung wert fläche flächeninhalt länge breite höhe umfang volumen ist",
    "wahrscheinlichkeit anzahl zahl entfernung geschwindigkeit zeit kosten preis summe gesamt",
    "ответ результат решение значение площадь длина ширина высота периметр объём объем",
    "вероятность количество число расстояние скорость время стоимость цена сумма итого",
    "окончательный",
    "答案 答案是 答案为 最终答案 结果 结果是 解 值 面积 面积为 长度 周长 体积 概率 概率为 个数",
    "数量 总数 距离 速度 时间 价格 费用 和 总和",
)
_BETWEEN = name_set(
    "of the a an in for to de des du d' la le les los las el der die das di del dell' della",
    "different distinct possible real positive whole natural prime even odd ordered remaining",
)
_REFUSED = words.NEGATIONS | words.HEDGES | words.CLAIMS


def is_plain_label(text: str) -> bool:
    """Whether the words name a quantity and say nothing else about the value."""
    spelled = words.plain_words(text).split()
    return bool(spelled) and all(map(_is_label_word, spelled))


def _is_label_word(word: str) -> bool:
    if word in _LABELS or word in _BETWEEN or word in COUNTS:
        return True
    return word not in _REFUSED and words.number_from_words(word) is None and is_noun(word)
