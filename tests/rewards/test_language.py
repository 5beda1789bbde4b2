"""The language axis, most of it with the real lid.176: its quirks are what the code is about."""

import pytest

from megatron_magistral.rewards.language import (
    UNDETERMINED,
    LanguageAgreement,
    fasttext_identifier,
    language_agreement,
    prose,
)

SENTENCES = {
    "en": "First we add the two numbers and then divide the result by three.",
    "fr": "D'abord on additionne les deux nombres, puis on divise le résultat par trois.",
    "es": "Primero sumamos los dos números y luego dividimos el resultado entre tres.",
    "it": "Prima sommiamo i due numeri e poi dividiamo il risultato per tre.",
    "de": "Zuerst addieren wir die beiden Zahlen und teilen dann das Ergebnis durch drei.",
    "zh": "首先我们把两个数相加，然后把结果除以三。",
    "ru": "Сначала сложим два числа, а затем разделим результат на три.",
}
ANSWERS = {
    "en": r"The answer is \boxed{4}.",
    "fr": r"La réponse est \boxed{4}.",
    "es": r"La respuesta es \boxed{4}.",
    "it": r"La risposta è \boxed{4}.",
    "de": r"Die Antwort ist \boxed{4}.",
    "zh": r"答案是 \boxed{4}。",
    "ru": r"Ответ: \boxed{4}.",
}


class FakeIdentifier:
    """Takes the first word of a text for its language."""

    def identify(self, prose: str) -> str:
        return (prose.split() or [UNDETERMINED])[0]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("aa x", "aa y", "aa z"), LanguageAgreement.AGREE),
        (("aa x", "aa y", "bb z"), LanguageAgreement.DISAGREE),
        (("aa x", "bb y", "aa z"), LanguageAgreement.DISAGREE),
        (("bb x", "aa y", "aa z"), LanguageAgreement.DISAGREE),
        (("aa x", "", "aa z"), LanguageAgreement.UNDETERMINED),
        (("aa x", "$y$", "bb z"), LanguageAgreement.UNDETERMINED),
    ],
)
def test_all_three_parts_must_be_identified_and_agree(parts, expected):
    assert language_agreement(FakeIdentifier(), *parts) is expected


@pytest.mark.parametrize("language", SENTENCES)
def test_every_language_of_the_paper_agrees_with_itself(language):
    agreement = language_agreement(
        fasttext_identifier(), SENTENCES[language], SENTENCES[language], ANSWERS[language]
    )
    assert agreement is LanguageAgreement.AGREE
    assert fasttext_identifier().identify(prose(SENTENCES[language])) == language


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(("language", "other"), [("en", "zh"), ("fr", "en"), ("ru", "de")])
def test_one_part_in_another_language_disagrees(language, other, place):
    parts = [SENTENCES[language]] * 3
    parts[place] = SENTENCES[other]
    agreement = language_agreement(fasttext_identifier(), *parts)
    assert agreement is LanguageAgreement.DISAGREE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain words", "plain words"),
        ("l'aire n'est pas 'ici' ' ", "l'aire n'est pas ici"),
        ("so $x^2 + alpha$ holds", "so holds"),
        ("so $$\nx^2\n$$ holds", "so holds"),
        (r"so \[ x \text{if} \] and \(beta\) hold", "so and hold"),
        (r"so \begin{align} abc &= def \end{align} holds", "so holds"),
        (r"so \boxed{abc} or \frac{ab}{2} \alpha", "so or"),
        ("so\n```python\nprint('words')\n```\nand `inline` ends", "so and ends"),
        ("so ```python\nnot a fence", "so python not fence"),
        ("so\n```python\nnever closed", "so"),
        ("it costs $5 and then $6 more", "it costs and then more"),
        ("3x + 12 = n, y: 4/5", ""),
        ("línea número\tdos\r\n三", "línea número dos 三"),
        ("a\ud800b\x00 word\ufffe", "word"),
        ("", ""),
    ],
)
def test_prose_keeps_words_and_drops_code_latex_digits_and_symbols(text, expected):
    assert prose(text) == expected


@pytest.mark.parametrize("text", ["", "   ", "\n", "3+4=7", r"\boxed{5}", "$x$", "```\ncode\n```"])
def test_a_text_without_words_has_no_language(text):
    assert fasttext_identifier().identify(prose(text)) == UNDETERMINED


def test_words_that_the_model_does_not_know_are_not_taken_for_english():
    assert fasttext_identifier().identify("hmm") == UNDETERMINED


@pytest.mark.parametrize("text", ["答案是", "计算", "和是7。", "化简分数。", "求余数。"])
def test_short_chinese_is_neither_unknown_nor_japanese(text):
    assert fasttext_identifier().identify(prose(text)) == "zh"


def test_japanese_stays_japanese():
    assert fasttext_identifier().identify(prose("答えは次の通りです。")) == "ja"


def test_the_model_is_loaded_once():
    assert fasttext_identifier() is fasttext_identifier()


def test_foreign_code_and_formulas_do_not_change_the_language():
    german = SENTENCES["de"] + "\n```python\nfor the_number in numbers: print(the_number)\n```\n"
    assert fasttext_identifier().identify(prose(german)) == "de"


@pytest.mark.parametrize(
    "unit", [r"\[", "$", "$ a", "`", r"\a{", r"\begin{", r"\boxed{", "```\n", "$$ $", "word "]
)
def test_hostile_repetition_leaves_no_more_words_than_it_had(unit):
    """Every step is linear in the text: quadratic work on 300k characters would hang this test."""
    words = prose(unit * (300_000 // len(unit)))
    assert set(words.split()) <= {"word", "begin", "boxed"}
