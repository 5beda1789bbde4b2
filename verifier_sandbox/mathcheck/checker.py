"""The check itself: its layers in order, and what each outcome is called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from . import fallback, policy
from .answers import Answer, Quantity, Words
from .boxed import has_box, last_boxed
from .choices import Choice, Choices, read_choice, read_choices, same_choices
from .compare import Comparison
from .lexer import tokenize
from .numbers import AMBIGUOUS_COMMA, AMBIGUOUS_GROUP, CommaRule
from .numeric import WorkBudget
from .reader import read_answer
from .result import MathResult, MathVerdict, TooBig, Undefined, Unreadable
from .tokens import Kind, Token
from .unify import unify

_LEADING_ZEROS = re.compile(r"0\d+")


@dataclass(frozen=True)
class Reading:
    """One answer text, read once."""

    text: str = ""
    """The unified text."""
    spelling: tuple[tuple[Kind, str], ...] = ()
    """Kinds and texts of the tokens without styling: equal spellings are equal answers."""
    choice: Choice | None = None
    choices: Choices | None = None
    answer: Answer | None = None
    """The likeliest meaning."""
    has_decimal: bool = False
    """Whether a number is written with a decimal point."""
    is_from_sympy: bool = False
    """Whether only SymPy could read it."""
    problem: MathResult | None = None
    """Why there is no answer, as the result it leads to."""


def check(reference: str, response_text: str) -> MathResult:
    """Whether the final answer of the response equals the reference answer.

    The answer is the last balanced box of `response_text`, or all of it if it opens no box. Pure
    and safe in any thread; a reference is read once and kept for the next responses.
    """
    answer = last_boxed(response_text) if has_box(response_text) else response_text
    if answer is None:
        return MathResult(MathVerdict.UNREADABLE_PREDICTION, "the box is not closed")
    if has_box(reference):
        reference = last_boxed(reference) or reference
    if not answer.strip():
        return MathResult(MathVerdict.UNREADABLE_PREDICTION, "empty answer")
    if reference.strip() == answer.strip():
        return MathResult(MathVerdict.CORRECT, "equal strings")
    if len(answer) > policy.MAX_ANSWER_CHARS:
        return MathResult(MathVerdict.TOO_BIG, f"an answer of {len(answer)} characters")
    expected = read_reference(reference)
    return _compare(
        expected,
        _read(answer, MathVerdict.UNREADABLE_PREDICTION, with_sympy=expected.is_from_sympy),
    )


@lru_cache(maxsize=256)
def read_reference(text: str) -> Reading:
    """Read a reference; the reading is kept for the other completions of its group."""
    if len(text) > policy.MAX_ANSWER_CHARS:
        too_big = MathResult(MathVerdict.TOO_BIG, f"a reference of {len(text)} characters")
        return Reading(problem=too_big)
    return _read(text, MathVerdict.UNREADABLE_REFERENCE, with_sympy=fallback.is_loaded())


def _read(text: str, unreadable: MathVerdict, *, with_sympy: bool) -> Reading:
    tokens: list[Token] = []
    answer: Answer | None = None
    problem: MathResult | None = None
    unified = unify(text)
    try:
        tokens = tokenize(unified)
        answer = read_answer(tokens)
    except Unreadable as error:
        problem = MathResult(unreadable, str(error))
    except TooBig as error:
        problem = MathResult(MathVerdict.TOO_BIG, str(error))
    is_from_sympy = with_sympy and problem is not None and problem.verdict is unreadable
    if is_from_sympy:
        try:
            answer, problem = Quantity(fallback.read(text)), None
        except Unreadable:
            is_from_sympy = False
    return Reading(
        text=unified,
        spelling=_spelling(tokens),
        choice=read_choice(tokens),
        choices=read_choices(tokens),
        answer=answer,
        has_decimal=any(
            token.literal is not None and token.literal.num_decimals is not None for token in tokens
        ),
        is_from_sympy=is_from_sympy,
        problem=problem,
    )


def _spelling(tokens: list[Token]) -> tuple[tuple[Kind, str], ...]:
    """The tokens as written, but for braces around a single token."""
    spelling: list[tuple[Kind, str]] = []
    for token in tokens:
        spelling.append((token.kind, token.text))
        is_group = token.is_(Kind.CLOSE, "{") and len(spelling) >= 3
        if (
            is_group
            and spelling[-3] == (Kind.OPEN, "{")
            and spelling[-2][0]
            not in (
                Kind.OPEN,
                Kind.CLOSE,
            )
        ):
            spelling[-3:] = [spelling[-2]]
    return tuple(spelling)


# How two readings are compared


def _compare(reference: Reading, prediction: Reading) -> MathResult:
    if (reason := _same_without_reading(reference, prediction)) is not None:
        return MathResult(MathVerdict.CORRECT, reason)
    if same_choices(reference.choices, prediction.choices) is False:
        return MathResult(MathVerdict.WRONG, "other choices, or in another order")
    try:
        for place, (expected, answer) in enumerate(_pairs(reference, prediction)):
            if Comparison(WorkBudget()).equal(expected, answer):
                reason = "equal" if place == 0 else "equal by another reading of the comma"
                return MathResult(MathVerdict.CORRECT, reason)
    except TooBig as error:
        return MathResult(MathVerdict.TOO_BIG, str(error))
    except MemoryError:
        return MathResult(MathVerdict.TOO_BIG, "a value that does not fit into memory")
    except Undefined as error:
        return MathResult(MathVerdict.WRONG, str(error))
    if reference.choice is not None and prediction.choice is not None:
        return MathResult(MathVerdict.WRONG, "another choice")
    problem = reference.problem or prediction.problem
    return problem or MathResult(
        MathVerdict.WRONG, f"{_shape(prediction.answer)} for {_shape(reference.answer)}"
    )


def _same_without_reading(reference: Reading, prediction: Reading) -> str | None:
    """Why the two are the same although no value was compared, or None."""
    if reference.spelling and reference.spelling == prediction.spelling:
        return "equal tokens"
    if _same_choice(reference.choice, prediction.choice):
        return "the same choice"
    if same_choices(reference.choices, prediction.choices):
        return "the same choices"
    if _spells_word(prediction, reference) or _spells_word(reference, prediction):
        return "the same word"
    return None


def _same_choice(reference: Choice | None, prediction: Choice | None) -> bool:
    """Whether the letters agree, and where both repeat what the option says, that too."""
    if reference is None or prediction is None or reference.letter != prediction.letter:
        return False
    if not reference.option or not prediction.option:
        return True
    expected, answer = _option_of(reference), _option_of(prediction)
    if expected is None or answer is None:
        return _spelling([*reference.option]) == _spelling([*prediction.option])
    try:
        return Comparison(WorkBudget()).equal(expected, answer)
    except (TooBig, Undefined):
        return False


def _option_of(choice: Choice | None) -> Answer | None:
    """What the option says, such as 12 in (B) 12."""
    try:
        return read_answer(choice.option) if choice is not None and choice.option else None
    except (Unreadable, TooBig):
        return None


def _spells_word(bare: Reading, word: Reading) -> bool:
    """Whether letters that could be a product spell the word of the other side."""
    if not isinstance(word.answer, Words):
        return False
    letters = "".join(text for _, text in bare.spelling)
    is_bare = all(kind is Kind.LETTER for kind, _ in bare.spelling)
    return is_bare and letters.casefold() == word.answer.text


def _pairs(reference: Reading, prediction: Reading) -> Iterator[tuple[Answer, Answer]]:
    """The likeliest meaning of each side, then that of one with other meanings of the other."""
    if reference.answer is not None and prediction.answer is not None:
        yield reference.answer, prediction.answer
    option = _option_of(reference.choice) if prediction.choice is None else None
    if option is not None and prediction.answer is not None:
        yield option, prediction.answer
    if reference.answer is not None:
        is_decimal = reference.has_decimal or _has_leading_zero(prediction)
        for answer in _other_answers(prediction.text, is_decimal):
            yield reference.answer, answer
    if prediction.answer is not None:
        for answer in _other_answers(reference.text, _has_leading_zero(reference)):
            yield answer, prediction.answer


def _other_answers(text: str, is_decimal: bool) -> Iterator[Answer]:
    """What the text means under the other rules for commas between digits, if it has any."""
    rules: list[CommaRule] = []
    if AMBIGUOUS_GROUP.search(text) is not None:
        rules += [CommaRule.SEPARATOR, CommaRule.THOUSANDS]
    if is_decimal and AMBIGUOUS_COMMA.search(text) is not None:
        rules.append(CommaRule.DECIMAL)
    for rule in rules:
        try:
            tokens = tokenize(text, rule)
            if any(_LEADING_ZEROS.fullmatch(token.text) for token in tokens):
                continue  # 1,000 is no list of 1 and 000
            is_list = any(token.kind is Kind.SEPARATOR for token in tokens)
            if is_list or tokens[0].kind is not Kind.OPEN:  # (1,234) is a pair
                yield read_answer(tokens)
        except (Unreadable, TooBig):
            continue


def _has_leading_zero(reading: Reading) -> bool:
    """Whether it starts like 0,5: two values would hardly be written so."""
    return [text for _, text in reading.spelling[:2]] == ["0", ","]


def _shape(answer: Answer | None) -> str:
    return type(answer).__name__.rstrip("_").lower()
