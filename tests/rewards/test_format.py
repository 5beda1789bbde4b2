from dataclasses import replace

import msgspec
import pytest

from megatron_magistral.rewards.format import GateResult, GateStatus, gate, submission_language
from megatron_magistral.rewards.markdown import FencedBlock, split_fences
from megatron_magistral.types import CodeLanguage
from tests.rewards.problems import CODE, MATHS, response

BOX = r"It is \boxed{3}."
BLOCK = "Here:\n```python\nprint(input())\n```\n"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (response(BOX), GateStatus.PASSED),
        (f"<think></think>{BOX}", GateStatus.PASSED),
        ("", GateStatus.NO_THINK_AT_START),
        (BOX, GateStatus.NO_THINK_AT_START),
        (" " + response(BOX), GateStatus.NO_THINK_AT_START),
        ("\n" + response(BOX), GateStatus.NO_THINK_AT_START),
        ("<Think>a</Think>" + BOX, GateStatus.NO_THINK_AT_START),
        (f"</think><think>{BOX}", GateStatus.NO_THINK_AT_START),
        (f"<think>a{BOX}", GateStatus.THINK_COUNT),
        (f"<think>a<think>b</think>{BOX}", GateStatus.THINK_COUNT),
        (f"<think>a</think>b</think>{BOX}", GateStatus.THINK_COUNT),
        (response(BOX) + "<think>", GateStatus.THINK_COUNT),
        (response(BOX) + "</think>", GateStatus.THINK_COUNT),
        (response(BOX) + response(BOX), GateStatus.THINK_COUNT),
        (response(r"It is \boxed{3"), GateStatus.NO_BOXED),
        (response("It is 3."), GateStatus.NO_BOXED),
        (response("", thoughts=BOX), GateStatus.NO_BOXED),
        (response(r"\boxed{}"), GateStatus.NO_BOXED),
        (response(r"\boxed{ }"), GateStatus.NO_BOXED),
        (response(r"\fbox{3}"), GateStatus.NO_BOXED),
        (response(r"boxed{3}"), GateStatus.NO_BOXED),
    ],
)
def test_the_gate_for_maths(text, status):
    assert gate(MATHS, text).status is status


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (BLOCK, GateStatus.PASSED),
        ("```\nplain\n```\n" + BLOCK, GateStatus.PASSED),
        (BLOCK.rstrip(), GateStatus.PASSED),
        ("print(input())", GateStatus.NO_CODE_BLOCK),
        ("```python print(input())```", GateStatus.NO_CODE_BLOCK),
        ("```python\nprint(input())", GateStatus.NO_CODE_BLOCK),
        ("~~~python\nprint(input())\n~~~", GateStatus.NO_CODE_BLOCK),
        ("", GateStatus.NO_CODE_BLOCK),
        ("```\nprint(input())\n```", GateStatus.NO_LANGUAGE_TAG),
    ],
)
def test_the_gate_for_code(answer, status):
    assert gate(CODE, response(answer)).status is status


def test_a_code_block_in_the_thoughts_is_no_answer():
    assert gate(CODE, response("done", thoughts=BLOCK)).status is GateStatus.NO_CODE_BLOCK


def test_maths_need_a_box_and_code_needs_a_block_not_the_other_way_round():
    assert gate(MATHS, response(BLOCK)).status is GateStatus.NO_BOXED
    assert gate(CODE, response(BOX)).status is GateStatus.NO_CODE_BLOCK


def test_the_response_is_split_into_thoughts_and_answer():
    result = gate(MATHS, "<think>\nhm\n</think>\n" + BOX)
    assert result == GateResult(GateStatus.PASSED, "\nhm\n", "\n" + BOX, "3")


@pytest.mark.parametrize(
    ("answer", "submission"),
    [
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{2} and \boxed{3", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    ],
)
def test_the_last_balanced_box_is_submitted(answer, submission):
    assert gate(MATHS, response(answer)).submission == submission


@pytest.mark.parametrize(
    ("answer", "submission", "tag"),
    [
        ("```python\na\n```\n```cpp\nb\n```", "a\n", "python"),
        ("```C++ title=x\na\n\nb\n```", "a\n\nb\n", "C++"),
        ("1. so\n   ```py\n   if a:\n     b\n   ```", "if a:\n  b\n", "py"),
        ("````python\n```\na\n````", "```\na\n", "python"),
        ("```\nin\n```\n```python\na\n```", "in\n", ""),
        ("```python\n```", "", "python"),
    ],
)
def test_the_first_block_is_submitted_with_its_tag(answer, submission, tag):
    result = gate(CODE, response(answer))
    assert (result.status, result.submission, result.tag) == ("passed", submission, tag)


@pytest.mark.parametrize(
    ("asked", "tag", "language"),
    [
        (CodeLanguage.CPP, "python", CodeLanguage.CPP),
        (None, "Python3", CodeLanguage.PYTHON),
        (None, "C++", CodeLanguage.CPP),
        (None, "rust", None),
        (None, "", None),
    ],
)
def test_a_program_runs_in_the_language_asked_for_else_in_that_of_its_tag(asked, tag, language):
    problem = msgspec.structs.replace(CODE, code_language=asked)
    result = replace(gate(CODE, response(BLOCK)), tag=tag)
    assert submission_language(problem, result) is language


def test_blocks_and_prose_are_told_apart():
    blocks, prose = split_fences("a\n```py\nb\n```\nc\n```\nd\n```\ne\n```cpp\nnever closed")
    assert blocks == [FencedBlock("py", "b\n"), FencedBlock("", "d\n")]
    assert prose == "a\nc\ne"


@pytest.mark.parametrize("unit", [r"\boxed{", "{", "```\n", "`", "<think", "\\"])
@pytest.mark.parametrize("problem", [MATHS, CODE], ids=["maths", "code"])
def test_hostile_repetition_passes_no_gate(problem, unit):
    """Every step is linear in the text: quadratic work on 300k characters would hang this test."""
    assert not gate(problem, response(unit * (300_000 // len(unit)))).passed
