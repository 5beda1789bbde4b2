"""The words of the tiny world: statements, thoughts and answers in seven languages.

Only text lives here. Slots: `{a} {b} {c}` operands, `{p} {q}` fractions, `{formula}` a LaTeX
expression, `{name} {things}` from the same language, `{tool}` Python or C++, `{sign} {verb}` the
words for adding or subtracting, `{work}` a calculation. Every sentence has enough words for a
language classifier to recognise it once LaTeX and code are removed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wording:
    """Everything the tiny world says in one language."""

    names: tuple[str, ...]
    things: tuple[str, ...]
    statements: dict[str, str]  # by wording key: a story or a bare question
    programs: dict[str, str]  # statement of a programming problem, by form
    plans: dict[str, str]  # careful thoughts about a program, by form
    plus_minus: tuple[str, str]
    add_subtract: tuple[str, str]
    steps: dict[str, str]  # careful thoughts about a calculation, by operation
    guess: str  # hasty thoughts
    answer: str
    program_follows: str


ENGLISH = Wording(
    names=("Tom", "Anna", "Sam", "Lucy", "Ben", "Rosa"),
    things=("apples", "books", "coins", "cards"),
    statements={
        "gain_loss": "{name} has ${a}$ {things}, gets ${b}$ more and gives away ${c}$. "
        "How many {things} are left?",
        "groups": "There are ${a}$ boxes with ${b}$ {things} each and ${c}$ more {things}. "
        "How many {things} are there in total?",
        "spend": "{name} buys ${a}$ boxes with ${b}$ {things} each and loses ${c}$ of them. "
        "How many {things} are left?",
        "left": "{name} eats ${p}$ of a cake and later ${q}$ more. "
        "What fraction of the cake is left?",
        "value": "What is the value of ${formula}$?",
        "expand": "Expand and simplify the expression ${formula}$.",
    },
    programs={
        "number": "Write a {tool} program that reads an integer and prints "
        "${a}$ times this integer {sign} ${b}$.",
        "sum": "Write a {tool} program that reads two integers on one line and prints "
        "${a}$ times their sum {sign} ${b}$.",
        "larger": "Write a {tool} program that reads two integers on one line and prints "
        "${a}$ times the larger one {sign} ${b}$.",
    },
    plans={
        "number": "I read the integer, multiply it by ${a}$ and then {verb} ${b}$.",
        "sum": "I read both integers, take the sum, multiply it by ${a}$ and then {verb} ${b}$.",
        "larger": "I read both integers, take the larger one, multiply it by ${a}$ "
        "and then {verb} ${b}$.",
    },
    plus_minus=("plus", "minus"),
    add_subtract=("add", "subtract"),
    steps={
        "add": "I add the numbers: ${work}$.",
        "subtract": "I subtract the rest: ${work}$.",
        "multiply": "I multiply the numbers: ${work}$.",
        "numerator": "The numerator is ${work}$.",
        "denominator": "The denominator is ${work}$.",
    },
    guess="I think I know the answer.",
    answer="The answer is ${work}$.",
    program_follows="Here is the program:",
)

FRENCH = Wording(
    names=("Luc", "Marie"),
    things=("pommes", "cartes"),
    statements={
        "gain_loss": "{name} a ${a}$ {things}, en reçoit encore ${b}$ et en donne ${c}$. "
        "Combien de {things} reste-t-il ?",
        "groups": "Il y a ${a}$ boîtes avec ${b}$ {things} chacune et encore ${c}$ {things}. "
        "Combien de {things} y a-t-il en tout ?",
        "spend": "{name} achète ${a}$ boîtes de ${b}$ {things} chacune et en perd ${c}$. "
        "Combien de {things} reste-t-il ?",
        "left": "{name} mange ${p}$ d'un gâteau et plus tard encore ${q}$. "
        "Quelle fraction du gâteau reste-t-il ?",
        "value": "Quelle est la valeur de ${formula}$ ?",
        "expand": "Développez et simplifiez l'expression ${formula}$.",
    },
    programs={
        "number": "Écris un programme en {tool} qui lit un entier et affiche "
        "${a}$ fois cet entier {sign} ${b}$.",
        "sum": "Écris un programme en {tool} qui lit deux entiers sur une ligne et affiche "
        "${a}$ fois leur somme {sign} ${b}$.",
        "larger": "Écris un programme en {tool} qui lit deux entiers sur une ligne et affiche "
        "${a}$ fois le plus grand {sign} ${b}$.",
    },
    plans={
        "number": "Je lis l'entier, je le multiplie par ${a}$ et puis {verb} ${b}$.",
        "sum": "Je lis les deux entiers, je prends la somme, je la multiplie par ${a}$ "
        "et puis {verb} ${b}$.",
        "larger": "Je lis les deux entiers, je prends le plus grand, je le multiplie par ${a}$ "
        "et puis {verb} ${b}$.",
    },
    plus_minus=("plus", "moins"),
    add_subtract=("j'ajoute", "je soustrais"),
    steps={
        "add": "J'additionne les nombres : ${work}$.",
        "subtract": "Je soustrais le reste : ${work}$.",
        "multiply": "Je multiplie les nombres : ${work}$.",
        "numerator": "Le numérateur est ${work}$.",
        "denominator": "Le dénominateur est ${work}$.",
    },
    guess="Je crois que je connais la réponse.",
    answer="La réponse est ${work}$.",
    program_follows="Voici le programme :",
)

SPANISH = Wording(
    names=("Juan", "Elena"),
    things=("manzanas", "cartas"),
    statements={
        "gain_loss": "{name} tiene ${a}$ {things}, recibe ${b}$ más y regala ${c}$. "
        "¿Cuántas {things} le quedan?",
        "groups": "Hay ${a}$ cajas con ${b}$ {things} cada una y ${c}$ {things} más. "
        "¿Cuántas {things} hay en total?",
        "spend": "{name} compra ${a}$ cajas con ${b}$ {things} cada una y pierde ${c}$. "
        "¿Cuántas {things} le quedan?",
        "left": "{name} come ${p}$ de un pastel y más tarde otros ${q}$. "
        "¿Qué fracción del pastel queda?",
        "value": "¿Cuál es el valor de ${formula}$?",
        "expand": "Desarrolla y simplifica la expresión ${formula}$.",
    },
    programs={
        "number": "Escribe un programa en {tool} que lea un número entero e imprima "
        "${a}$ veces ese número {sign} ${b}$.",
        "sum": "Escribe un programa en {tool} que lea dos números enteros en una línea e imprima "
        "${a}$ veces su suma {sign} ${b}$.",
        "larger": "Escribe un programa en {tool} que lea dos números enteros en una línea "
        "e imprima ${a}$ veces el mayor {sign} ${b}$.",
    },
    plans={
        "number": "Leo el número, lo multiplico por ${a}$ y luego {verb} ${b}$.",
        "sum": "Leo los dos números, calculo la suma, la multiplico por ${a}$ "
        "y luego {verb} ${b}$.",
        "larger": "Leo los dos números, tomo el mayor, lo multiplico por ${a}$ "
        "y luego {verb} ${b}$.",
    },
    plus_minus=("más", "menos"),
    add_subtract=("sumo", "resto"),
    steps={
        "add": "Sumo los números: ${work}$.",
        "subtract": "Luego resto los demás: ${work}$.",
        "multiply": "Multiplico los números: ${work}$.",
        "numerator": "El numerador es ${work}$.",
        "denominator": "El denominador es ${work}$.",
    },
    guess="Creo que ya sé la respuesta.",
    answer="La respuesta es ${work}$.",
    program_follows="Este es el programa:",
)

ITALIAN = Wording(
    names=("Marco", "Giulia"),
    things=("mele", "carte"),
    statements={
        "gain_loss": "{name} ha ${a}$ {things}, ne riceve altre ${b}$ e ne regala ${c}$. "
        "Quante {things} restano?",
        "groups": "Ci sono ${a}$ scatole con ${b}$ {things} ciascuna e altre ${c}$ {things}. "
        "Quante {things} ci sono in tutto?",
        "spend": "{name} compra ${a}$ scatole con ${b}$ {things} ciascuna e poi ne perde ${c}$. "
        "Quante {things} restano in tutto?",
        "left": "{name} mangia ${p}$ di una torta e più tardi ancora ${q}$. "
        "Quale frazione della torta resta?",
        "value": "Qual è il valore di ${formula}$?",
        "expand": "Sviluppa e semplifica l'espressione ${formula}$.",
    },
    programs={
        "number": "Scrivi un programma in {tool} che legga un numero intero e stampi "
        "${a}$ volte questo numero {sign} ${b}$.",
        "sum": "Scrivi un programma in {tool} che legga due numeri interi su una riga e stampi "
        "${a}$ volte la loro somma {sign} ${b}$.",
        "larger": "Scrivi un programma in {tool} che legga due numeri interi su una riga e stampi "
        "${a}$ volte il maggiore {sign} ${b}$.",
    },
    plans={
        "number": "Leggo il numero, lo moltiplico per ${a}$ e poi {verb} ${b}$.",
        "sum": "Leggo i due numeri, calcolo la somma, la moltiplico per ${a}$ e poi {verb} ${b}$.",
        "larger": "Leggo i due numeri, prendo il maggiore, lo moltiplico per ${a}$ "
        "e poi {verb} ${b}$.",
    },
    plus_minus=("più", "meno"),
    add_subtract=("aggiungo", "sottraggo"),
    steps={
        "add": "Sommo tutti i numeri: ${work}$.",
        "subtract": "Poi sottraggo il resto: ${work}$.",
        "multiply": "Moltiplico i numeri: ${work}$.",
        "numerator": "Il numeratore è ${work}$.",
        "denominator": "Il denominatore è ${work}$.",
    },
    guess="Credo di sapere già la risposta.",
    answer="La risposta è ${work}$.",
    program_follows="Ecco il programma:",
)

GERMAN = Wording(
    names=("Jonas", "Greta"),
    things=("Birnen", "Karten"),
    statements={
        "gain_loss": "{name} hat ${a}$ {things}, bekommt ${b}$ dazu und verschenkt ${c}$. "
        "Wie viele {things} bleiben übrig?",
        "groups": "Es gibt ${a}$ Kisten mit je ${b}$ {things} und noch ${c}$ {things}. "
        "Wie viele {things} sind es insgesamt?",
        "spend": "{name} kauft ${a}$ Kisten mit je ${b}$ {things} und verliert ${c}$ davon. "
        "Wie viele {things} bleiben übrig?",
        "left": "{name} isst ${p}$ eines Kuchens und später noch ${q}$. "
        "Welcher Bruchteil des Kuchens bleibt übrig?",
        "value": "Welchen Wert hat der Ausdruck ${formula}$?",
        "expand": "Multipliziere den Ausdruck ${formula}$ aus und vereinfache ihn.",
    },
    programs={
        "number": "Schreibe ein Programm in {tool}, das eine ganze Zahl liest und "
        "${a}$ mal diese Zahl {sign} ${b}$ ausgibt.",
        "sum": "Schreibe ein Programm in {tool}, das zwei ganze Zahlen aus einer Zeile liest und "
        "${a}$ mal ihre Summe {sign} ${b}$ ausgibt.",
        "larger": "Schreibe ein Programm in {tool}, das zwei ganze Zahlen aus einer Zeile liest "
        "und ${a}$ mal die größere {sign} ${b}$ ausgibt.",
    },
    plans={
        "number": "Ich lese die Zahl, nehme sie mal ${a}$ und {verb} dann ${b}$.",
        "sum": "Ich lese beide Zahlen, bilde die Summe, nehme sie mal ${a}$ und {verb} dann ${b}$.",
        "larger": "Ich lese beide Zahlen, wähle die größere, nehme sie mal ${a}$ "
        "und {verb} dann ${b}$.",
    },
    plus_minus=("plus", "minus"),
    add_subtract=("addiere", "subtrahiere"),
    steps={
        "add": "Ich addiere die Zahlen: ${work}$.",
        "subtract": "Ich ziehe den Rest ab: ${work}$.",
        "multiply": "Ich multipliziere die Zahlen: ${work}$.",
        "numerator": "Der Zähler ist ${work}$.",
        "denominator": "Der Nenner ist ${work}$.",
    },
    guess="Ich glaube, ich weiß die Antwort.",
    answer="Die Antwort ist ${work}$.",
    program_follows="Hier ist das Programm:",
)

CHINESE = Wording(
    names=("小明", "小红"),
    things=("苹果", "橙子"),
    statements={
        "gain_loss": "{name}有${a}$个{things}，又得到${b}$个，送出${c}$个。还剩多少个{things}？",
        "groups": "有${a}$个盒子，每个盒子里有${b}$个{things}，另外还有${c}$个{things}。"
        "一共有多少个{things}？",
        "spend": "{name}买了${a}$个盒子，每个盒子里有${b}$个{things}，后来丢了${c}$个。"
        "还剩多少个{things}？",
        "left": "{name}吃了蛋糕的${p}$，后来又吃了${q}$。还剩下蛋糕的几分之几？",
        "value": "请问这个式子的值是多少：${formula}$？",
        "expand": "请展开并化简这个式子：${formula}$。",
    },
    programs={
        "number": "请用{tool}写一个程序，读入一个整数，输出这个整数的${a}$倍{sign}${b}$。",
        "sum": "请用{tool}写一个程序，读入一行中的两个整数，输出它们的和的${a}$倍{sign}${b}$。",
        "larger": "请用{tool}写一个程序，读入一行中的两个整数，"
        "输出其中较大的数的${a}$倍{sign}${b}$。",
    },
    plans={
        "number": "我先读入这个整数，乘以${a}$，然后{verb}${b}$。",
        "sum": "我先读入两个整数，求和，乘以${a}$，然后{verb}${b}$。",
        "larger": "我先读入两个整数，取较大的数，乘以${a}$，然后{verb}${b}$。",
    },
    plus_minus=("加上", "减去"),
    add_subtract=("加上", "减去"),
    steps={
        "add": "我把这些数相加：${work}$。",
        "subtract": "我再减去这个数：${work}$。",
        "multiply": "我把这些数相乘：${work}$。",
        "numerator": "所以分子是${work}$。",
        "denominator": "所以分母是${work}$。",
    },
    guess="我想我知道答案了。",
    answer="所以答案是${work}$。",
    program_follows="这是我写的程序：",
)

RUSSIAN = Wording(
    names=("Анны", "Ивана"),
    things=("яблок", "книг"),
    statements={
        "gain_loss": "У {name} было {things}: ${a}$, потом стало больше на ${b}$, "
        "а затем меньше на ${c}$. Сколько {things} осталось?",
        "groups": "Коробок всего ${a}$, {things} в каждой по ${b}$, и отдельно ещё ${c}$. "
        "Сколько всего {things}?",
        "spend": "Коробок купили ${a}$, {things} в каждой по ${b}$, а потом потеряли ${c}$. "
        "Сколько {things} осталось?",
        "left": "Сначала съели ${p}$ торта, а потом ещё ${q}$. Какая часть торта осталась?",
        "value": "Чему равно значение выражения ${formula}$?",
        "expand": "Раскройте скобки и упростите выражение ${formula}$.",
    },
    programs={
        "number": "Напишите программу на {tool}, которая читает целое число и выводит "
        "это число, умноженное на ${a}$, {sign} ${b}$.",
        "sum": "Напишите программу на {tool}, которая читает два целых числа из одной строки "
        "и выводит их сумму, умноженную на ${a}$, {sign} ${b}$.",
        "larger": "Напишите программу на {tool}, которая читает два целых числа из одной строки "
        "и выводит большее из них, умноженное на ${a}$, {sign} ${b}$.",
    },
    plans={
        "number": "Я читаю число, умножаю его на ${a}$ и потом {verb} ${b}$.",
        "sum": "Я читаю оба числа, нахожу сумму, умножаю её на ${a}$ и потом {verb} ${b}$.",
        "larger": "Я читаю оба числа, беру большее, умножаю его на ${a}$ и потом {verb} ${b}$.",
    },
    plus_minus=("плюс", "минус"),
    add_subtract=("прибавляю", "вычитаю"),
    steps={
        "add": "Я складываю эти числа: ${work}$.",
        "subtract": "Я вычитаю остаток: ${work}$.",
        "multiply": "Я умножаю эти числа: ${work}$.",
        "numerator": "Числитель дроби равен ${work}$.",
        "denominator": "Знаменатель дроби равен ${work}$.",
    },
    guess="Я думаю, что знаю ответ.",
    answer="Значит, ответ равен ${work}$.",
    program_follows="Вот эта программа:",
)

WORDINGS = {
    "en": ENGLISH,
    "fr": FRENCH,
    "es": SPANISH,
    "it": ITALIAN,
    "de": GERMAN,
    "zh": CHINESE,
    "ru": RUSSIAN,
}
