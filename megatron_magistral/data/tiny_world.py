"""The tiny world: problems and traces from which a model of a few million weights can learn.

Problems are two-step calculations and small programs (`tiny_maths`, `tiny_code`), stated in English
and, for a tenth, in six other languages (`tiny_wording`). A hash of the structure and its operands
decides whether a problem is for training or held out, whatever its wording or language, so the two
sets share no calculation as a whole while every single step of a held-out problem can be learned.

Traces are what supervised fine-tuning starts from, and like real ones they are of mixed quality:
careful work, careful work with a slip, hasty guesses, a missing box, thoughts that drift into
English. A model fine-tuned on them samples all of these; which of them pay is for reinforcement
learning to find out from the verifiers. Drills alone are always careful: arithmetic is learned
before, what reinforcement learning changes is when it is used.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_magistral.data.schema import write_rows
from megatron_magistral.data.tiny_code import (
    CODE_OPERANDS,
    FORMS,
    TOOL_NAMES,
    misread,
    program,
    test_cases,
)
from megatron_magistral.data.tiny_maths import (
    MATHS_STRUCTURES,
    NO_SLIP,
    Operands,
    Slip,
    fraction,
)
from megatron_magistral.data.tiny_wording import WORDINGS, Wording
from megatron_magistral.types import CodeLanguage, Kind, Problem, Trace

CATEGORY_SHARES = {
    "maths/numeric": 0.42,
    "maths/fraction": 0.20,
    "maths/symbolic": 0.18,
    "code/python": 0.15,
    "code/cpp": 0.05,
}
LANGUAGE_SHARES = {"en": 0.9} | {language: 0.1 / 6 for language in WORDINGS if language != "en"}

PROBLEMS_TRAIN_FILE = "problems_train.jsonl"
PROBLEMS_HELD_OUT_FILE = "problems_held_out.jsonl"
TRACES_FILE = "traces.jsonl"

_CODE_CATEGORIES = {"code/python": CodeLanguage.PYTHON, "code/cpp": CodeLanguage.CPP}
_LETTERS = ("x", "y", "z", "n", "m", "t", "u", "w")
_HELD_OUT_ONE_IN = 5
_MAX_DRAWS = 1000


class Side(StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"


class Style(StrEnum):
    """How a trace was written."""

    CAREFUL = "careful"
    SLIP = "slip"  # careful, with one slip that is carried on to the answer
    GUESS = "guess"  # no work shown, right
    WRONG_GUESS = "wrong_guess"
    UNBOXED = "unboxed"  # careful, but the answer is in no box (code: in no fence)


STYLE_SHARES = {
    Style.CAREFUL: 0.42,
    Style.SLIP: 0.05,
    Style.GUESS: 0.12,
    Style.WRONG_GUESS: 0.37,
    Style.UNBOXED: 0.04,
}
DRIFT_RATE = 0.25  # of the non-English traces think in English
# Each of the six other languages is 1/60 of the problems: as few traces would not be learned.
TRACES_OTHER_LANGUAGES = 3
# Subtraction is what a small model learns last: 52 % of its steps right with 1, 74 % with 3.
TRACES_DRILL = 3


@dataclass(frozen=True)
class Exercise:
    """A problem together with what it was made from, which is what its traces are made from."""

    problem: Problem
    structure: str
    operands: Operands
    letter: str  # the variable of a symbolic problem

    @property
    def is_drill(self) -> bool:
        structure = MATHS_STRUCTURES.get(self.structure)
        return structure is not None and structure.is_drill


@dataclass(frozen=True)
class TinyWorld:
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    traces: tuple[Trace, ...]


def generate(seed: int, num_train: int, num_held_out: int, num_traces: int) -> TinyWorld:
    """Generate the world. Equal arguments give equal worlds, on every machine.

    Traces go round the training problems, each time in a newly drawn style. Raises ValueError if
    more problems are asked for than there are.
    """
    train = make_exercises(seed, Side.TRAIN, num_train)
    held_out = make_exercises(seed, Side.HELD_OUT, num_held_out)
    return TinyWorld(
        train=tuple(exercise.problem for exercise in train),
        held_out=tuple(exercise.problem for exercise in held_out),
        traces=make_traces(seed, train, num_traces),
    )


def write(world: TinyWorld, folder: Path) -> None:
    """Write the three files of a world into `folder`, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / PROBLEMS_TRAIN_FILE, world.train)
    write_rows(folder / PROBLEMS_HELD_OUT_FILE, world.held_out)
    write_rows(folder / TRACES_FILE, world.traces)


def side_of(structure: str, operands: Operands) -> Side:
    """On which side of the split a calculation is: in every wording and language, and however its
    operands are ordered where their order does not matter."""
    maths = MATHS_STRUCTURES.get(structure)
    if maths is not None and maths.is_drill:
        return Side.TRAIN
    if maths is not None:
        operands = maths.canonical(operands)
    digest = hashlib.blake2b(f"{structure} {operands}".encode(), digest_size=8).digest()
    held_out = int.from_bytes(digest, "big") % _HELD_OUT_ONE_IN == 0
    return Side.HELD_OUT if held_out else Side.TRAIN


def make_exercises(seed: int, side: Side, count: int) -> tuple[Exercise, ...]:
    """`count` exercises with distinct statements, in fixed shares of categories and languages."""
    rng = random.Random(f"{seed} {side}")
    cells = {
        (category, language): category_share * language_share
        for category, category_share in CATEGORY_SHARES.items()
        for language, language_share in LANGUAGE_SHARES.items()
    }
    spaces = {category: _space(category, side) for category in CATEGORY_SHARES}
    statements: set[str] = set()
    exercises = []
    for (category, language), quota in apportion(count, cells).items():
        for _ in range(quota):
            exercise = _draw_new(rng, spaces[category], category, language, statements)
            statements.add(exercise.problem.statement)
            exercises.append(exercise)
    rng.shuffle(exercises)
    return tuple(exercises)


def apportion(count: int, shares: dict) -> dict:
    """Whole numbers that add up to `count`, each within one of its share (largest remainder)."""
    total = sum(shares.values())
    exact = {key: count * share / total for key, share in shares.items()}
    quotas = {key: int(value) for key, value in exact.items()}
    by_remainder = sorted(exact, key=lambda key: quotas[key] - exact[key])
    for key in by_remainder[: count - sum(quotas.values())]:
        quotas[key] += 1
    return quotas


def make_traces(seed: int, exercises: Sequence[Exercise], count: int) -> tuple[Trace, ...]:
    """`count` traces of mixed quality, going round `exercises`: drills come TRACES_DRILL times as
    often and always careful, other languages than English TRACES_OTHER_LANGUAGES times."""
    if count and not exercises:
        raise ValueError(f"num_traces is {count} but num_train is 0: traces need problems")
    rng = random.Random(f"{seed} traces")
    styles = [
        style for style, quota in apportion(count, STYLE_SHARES).items() for _ in range(quota)
    ]
    rng.shuffle(styles)
    sources = [exercise for exercise in exercises for _ in range(_traces_a_round(exercise))]
    rng.shuffle(sources)
    traces = []
    for index, style in enumerate(styles):
        exercise = sources[index % len(sources)]
        style = Style.CAREFUL if exercise.is_drill else style
        language = exercise.problem.language
        thinks_in = "en" if language != "en" and rng.random() < DRIFT_RATE else language
        response = respond(exercise, style, rng, thinks_in)
        traces.append(Trace(exercise.problem.id, exercise.problem.statement, response))
    return tuple(traces)


def _traces_a_round(exercise: Exercise) -> int:
    languages = 1 if exercise.problem.language == "en" else TRACES_OTHER_LANGUAGES
    return languages * (TRACES_DRILL if exercise.is_drill else 1)


def respond(
    exercise: Exercise, style: Style, rng: random.Random, thinks_in: str | None = None
) -> str:
    """The response of one trace: `<think>` thoughts `</think>` answer."""
    answers = WORDINGS[exercise.problem.language]
    thoughts = WORDINGS[thinks_in] if thinks_in else answers
    respond_kind = _respond_maths if exercise.problem.kind is Kind.MATHS else _respond_code
    thought, answer = respond_kind(exercise, style, rng, thoughts, answers)
    return f"<think>{thought}</think>\n{answer}"


def _respond_maths(
    exercise: Exercise, style: Style, rng: random.Random, thoughts: Wording, answers: Wording
) -> tuple[str, str]:
    slips = style in (Style.SLIP, Style.WRONG_GUESS)
    structure = MATHS_STRUCTURES[exercise.structure]
    step, delta = rng.randrange(structure.num_steps), rng.choice((-2, -1, 1, 2))
    slip = Slip(step, delta) if slips else NO_SLIP
    worked = structure.solve(exercise.operands, exercise.letter, slip)
    if style in (Style.GUESS, Style.WRONG_GUESS):
        thought = thoughts.guess
    else:
        steps = [thoughts.steps[operation].format(work=work) for operation, work in worked.steps]
        thought = " ".join(steps)
    boxed = worked.answer if style is Style.UNBOXED else rf"\boxed{{{worked.answer}}}"
    return thought, answers.answer.format(work=boxed)


def _respond_code(
    exercise: Exercise, style: Style, rng: random.Random, thoughts: Wording, answers: Wording
) -> tuple[str, str]:
    code_language = exercise.problem.code_language
    assert code_language is not None  # the schema's rule for Kind.CODE
    a, b = exercise.operands
    if style in (Style.GUESS, Style.WRONG_GUESS):
        thought = thoughts.guess
    else:
        verb = thoughts.add_subtract[b < 0]
        thought = thoughts.plans[exercise.structure].format(a=a, b=abs(b), verb=verb)
    slips = style in (Style.SLIP, Style.WRONG_GUESS)
    operands = misread(exercise.operands, rng) if slips else exercise.operands
    source = program(exercise.structure, operands, code_language)
    block = source if style is Style.UNBOXED else f"```{code_language}\n{source}\n```"
    return thought, f"{answers.program_follows}\n{block}"


def _space(category: str, side: Side) -> dict[str, tuple[Operands, ...]]:
    """The operands of every structure of a category on one side of the split."""
    if category in _CODE_CATEGORIES:
        whole = {form: CODE_OPERANDS for form in FORMS}
    else:
        whole = {
            name: structure.operands
            for name, structure in MATHS_STRUCTURES.items()
            if structure.category == category
        }
    sides = {
        name: tuple(operands for operands in space if side_of(name, operands) is side)
        for name, space in whole.items()
    }
    return {name: space for name, space in sides.items() if space}


def _draw_new(
    rng: random.Random,
    space: dict[str, tuple[Operands, ...]],
    category: str,
    language: str,
    statements: set[str],
) -> Exercise:
    for _ in range(_MAX_DRAWS):
        structure = rng.choice(tuple(space))
        exercise = _draw(rng, structure, rng.choice(space[structure]), category, language)
        if exercise.problem.statement not in statements:
            return exercise
    raise ValueError(
        f"the tiny world has too few distinct problems of {category} in {language!r}: "
        f"{len(statements)} problems drawn so far; ask for fewer"
    )


def _draw(
    rng: random.Random, structure: str, operands: Operands, category: str, language: str
) -> Exercise:
    wording = WORDINGS[language]
    letter = rng.choice(_LETTERS)
    code_language = _CODE_CATEGORIES.get(category)
    if code_language is not None:
        a, b = operands
        statement = wording.programs[structure].format(
            tool=TOOL_NAMES[code_language], a=a, b=abs(b), sign=wording.plus_minus[b < 0]
        )
        reference, cases = "", test_cases(structure, operands)
    else:
        maths = MATHS_STRUCTURES[structure]
        key = rng.choice(maths.wordings)
        slots = dict(zip("abc", operands, strict=False))
        statement = wording.statements[key].format(
            **slots,
            p=fraction(operands[0], operands[-1]),
            q=fraction(operands[1], operands[-1]),
            formula=maths.formula(operands, letter),
            name=rng.choice(wording.names),
            things=rng.choice(wording.things),
        )
        reference, cases = maths.solve(operands, letter, NO_SLIP).answer, ()
    digest = hashlib.blake2b(f"{category} {statement}".encode(), digest_size=6).hexdigest()
    problem = Problem(
        id=f"tiny-{digest}",
        kind=Kind.MATHS if code_language is None else Kind.CODE,
        category=category,
        language=language,
        statement=statement,
        reference=reference,
        tests=cases,
        code_language=code_language,
    )
    return Exercise(problem, structure, operands, letter)
