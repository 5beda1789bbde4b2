"""Words that may follow a number without changing it: what is counted, and how it is said.

A number with other words than these and units is not taken for the bare number: an open list would
also take "5 dozen", "5 tenths" and "5 is wrong" for 5.
"""

from __future__ import annotations

from .name_tables import name_set

COUNTS = name_set(
    "unit units u way ways solution solutions possibility possibilities item items",
    "value values integer integers number numbers pair pairs total piece pieces",
    "unité unités unidades unidad einheiten einheit unità единиц единица",
    "个 個 种 種 次 способов",
)
"""Words that count nothing in particular: with one of them a number has no unit."""

FILLERS = name_set(
    "of the in a an all each every per such different distinct possible total altogether real",
    "positive nonnegative whole natural complex prime even odd distinct unique valid ordered",
    "left remaining long high tall wide deep thick old away apart there total de des du d'",
    "red blue green white black yellow orange brown pink purple gray grey gold silver identical",
    "flour sugar water milk juice oil rice paint sand salt butter coffee tea soda gas fuel money",
    "la le les los las el der die das di del en im approximately approx increase",
    "interest discount",
)
"""Words that may stand before or after what is counted."""

NOUNS = name_set(
    # people
    "person people student pupil child children boy girl man men woman women adult",
    "teacher worker",
    "employee player member friend family passenger voter visitor guest customer player team",
    "class soldier runner rider swimmer candidate committee couples contestant participant human",
    "kid senior",
    # animals and plants
    "animal dog cat cow horse sheep pig goat chicken hen duck bird fish rabbit mouse mice rat",
    "snake bee ant spider frog turtle lion tiger elephant monkey legs leg head eye tree plant",
    "flower rose tulip seed leaf leaves bush puppy puppies kitten goose geese fly",
    "flies butterfly",
    "butterflies",
    # food
    "apple orange banana pear peach plum cherry cherries grape lemon strawberry strawberries",
    "mango melon watermelon tomato tomatoes potato potatoes carrot onion egg cookie cake pie",
    "pizza slice bread loaf loaves sandwich cup bottle glass glasses jar can candy candies sweet",
    "chocolate donut muffin cupcake nut peanut meal snack cracker pancake burger pound serving",
    "gallon teaspoon tablespoon recipe batch batches",
    # things
    "ball marble book page word letter digit card coin stamp sticker toy doll block brick box",
    "boxes bag basket bowl plate chair table desk lamp bed shirt shoe sock hat coat",
    "dress dresses",
    "pen pencil crayon marker notebook paper sheet ticket token chip bead button balloon gift",
    "present prize car bus buses truck train bike bicycle boat ship plane wheel tire room house",
    "door window floor wall tile roof store shop school city cities town country countries state",
    "street road bridge phone computer machine robot tool nail screw rope stick rock stone game",
    "match matches song movie picture photo painting poster envelope newspaper magazine rug",
    "carpet row column seat line group set part stack pile shelf shelves container bucket tank",
    "barrel pot carton crate pack package packet case drop tube rod bar rail post fence step",
    "stair lap trip question problem answer test exam quiz quizzes point goal vote mark grade",
    "lesson job task sample message email call program file bit byte pixel dollar",
    "bill cent penny",
    "pennies nickel dime dose pill tablet molecule atom electron particle cell battery batteries",
    "bulb light flag",
    # mathematics
    "solution roots zeros factor divisor multiples prime integer number real term element subset",
    "set function polynomial sequence permutation combination arrangement outcome",
    "event case path",
    "route method choice option tuple triples triplet quadruples triangle squares rectangle",
    "circle polygon quadrilateral pentagon hexagon octagon parallelogram trapezoid cubes sphere",
    "cylinder cone pyramid prism tetrahedron tetrahedra edge vertex vertices face side angle",
    "diagonal chord arc region sector segment ray plane axis axes coloring colouring",
    "color colour",
    "string code password configuration tiling partition graph node move turn round toss tosses",
    "throw roll flip game win draw shot pass interval period cycle rotation revolution turn",
    "degree minute digit divisor remainder matrix matrices equation intersection intercept",
    "coefficient place figure level stage year-old year-olds",
    # other languages
    "personne élève étudiant enfant fille garçon pomme livre bille boule carte pièce façon",
    "manière jeton solution nombre entier diviseur triangle côté sommet fois persona alumno",
    "estudiante niño niña manzana libro bola carta moneda manera forma solución número entero",
    "divisor triángulo lado vértice vez veces persone studente studenti bambino",
    "bambini mela mele",
    "libri palla palline carte monete modo modi soluzione soluzioni numero numeri intero",
    "triangolo triangoli lato lati volta volte person personen schüler kinder kind äpfel apfel",
    "bücher buch kugel kugeln karten münzen möglichkeit möglichkeiten weise lösung lösungen zahl",
    "zahlen dreieck dreiecke seite seiten mal человек людей ученик учеников детей ребёнок яблоко",
    "яблок яблока книга книг книги шар шаров шара карт карта монет монета способ способа решений",
    "решения решение число чисел числа раз штук треугольников треугольника 人 名 位",
    "只 隻 本 张 張 块 條 条",
    "件 枚 颗 顆 辆 輛 岁 頁 页 支 杯 瓶 箱 斤 头 匹 朵 棵 座 间 套 对 学生 同学 苹果",
    "书 球 解 组 組 方法 不同 的 数 整数 三角形 边 点 项 場 场 道",
    "题 步 层 行 列 分",
)


def is_noun(word: str) -> bool:
    """Whether the word, in lower case, names something that is counted, in singular or plural."""
    if word in NOUNS:
        return True
    if word.endswith("s") and (word[:-1] in NOUNS or word.removesuffix("es") in NOUNS):
        return True
    return not word.isascii() and word.isalpha() and _is_made_of_nouns(word)


def _is_made_of_nouns(word: str) -> bool:
    """Whether a run of Chinese characters is a sequence of such words: 个不同的三角形."""
    if not "\u2e80" <= word[0] <= "\u9fff" or len(word) > 12:
        return False
    ends = {0}
    for end in range(1, len(word) + 1):
        parts = (word[start:end] for start in ends if end - start <= 3)
        if any(part in NOUNS or part in COUNTS for part in parts):
            ends.add(end)
    return len(word) in ends
