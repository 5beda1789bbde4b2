"""From completion to reward, with a stand-in for the verifier service."""

import asyncio

import pytest

from megatron_magistral.rewards.settings import RewardSettings
from megatron_magistral.rollout.grader import RewardGrader
from megatron_magistral.types import CodeLanguage, GradeStatus, Kind, Problem, Reward, TestCase
from tests.fakes import completion_of, problem_of
from verifier_sandbox.mathcheck.result import MathResult, MathVerdict
from verifier_sandbox.protocol import JudgeRequest, JudgeResult, Language, Verdict

MATHS = problem_of("What is one and one?")
CODE = problem_of(
    "Add two numbers.",
    kind=Kind.CODE,
    reference="",
    tests=(TestCase("1 2", "3"), TestCase("2 2", "4")),
    code_language=CodeLanguage.PYTHON,
)
MATHS_ANSWER = r"<think>one and one</think>The answer is \boxed{2}."
CODE_ANSWER = "<think>just add</think>Here:\n```python\nprint(3)\n```\n"


class Identifier:
    """Takes every text for English."""

    def identify(self, prose: str) -> str:
        return "en"


class Verifiers:
    """Answers each request with the result it was made with; keeps the requests."""

    def __init__(self, result: MathResult | JudgeResult | None = None):
        self.result = result
        self.maths: list[tuple[str, str]] = []
        self.code: list[JudgeRequest] = []

    async def check_maths(self, reference: str, response: str) -> MathResult:
        self.maths.append((reference, response))
        return self.result

    async def judge(self, request: JudgeRequest) -> JudgeResult:
        self.code.append(request)
        return self.result


def grade(
    verifiers: Verifiers,
    problem: Problem,
    text: str,
    *,
    group: str = "7",
    proportional_code: bool = False,
) -> Reward:
    settings = RewardSettings(l_max=100, l_cache=20, proportional_code=proportional_code)
    grader = RewardGrader(verifiers, Identifier(), settings, num_code_tests=20)
    return asyncio.run(grader(problem, completion_of(text=text), group))


def judged(verdict: Verdict, num_passed: int = 0) -> JudgeResult:
    return JudgeResult(verdict=verdict, num_passed=num_passed, num_tests=2, detail="said so")


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (MATHS, r"no thoughts, \boxed{2}"),
        (MATHS, "<think>one and one</think>two"),
        (CODE, "<think>just add</think>print(3)"),
        (CODE, "<think>just add</think>```\nprint(3)\n```"),
        (CODE, ""),
    ],
)
def test_what_fails_the_gate_earns_nothing_and_is_shown_to_no_verifier(problem, text):
    verifiers = Verifiers()
    reward = grade(verifiers, problem, text)
    assert (reward.total, reward.status) == (0.0, GradeStatus.GRADED)
    assert verifiers.maths == [] and verifiers.code == []


def test_a_right_answer_is_paid_on_every_axis():
    reward = grade(Verifiers(MathResult(MathVerdict.CORRECT, "")), MATHS, MATHS_ANSWER)
    assert (reward.format, reward.correctness, reward.language) == (0.1, 0.9, 0.1)
    assert reward.is_solved


def test_a_wrong_answer_keeps_the_format_and_language_rewards():
    reward = grade(Verifiers(MathResult(MathVerdict.WRONG, "no")), MATHS, MATHS_ANSWER)
    assert (reward.format, reward.correctness, reward.language) == (0.1, 0.0, 0.1)
    assert not reward.is_solved


@pytest.mark.parametrize("verdict", ["unreadable_prediction", "too_big", "timeout"])
def test_only_a_correct_verdict_pays_and_the_others_are_graded(verdict):
    reward = grade(Verifiers(MathResult(MathVerdict(verdict), "")), MATHS, MATHS_ANSWER)
    assert reward.correctness == 0
    assert not reward.is_solved
    assert reward.status is GradeStatus.GRADED


def test_the_maths_verifier_sees_the_reference_and_the_answer_without_the_thoughts():
    verifiers = Verifiers(MathResult(MathVerdict.CORRECT, ""))
    grade(verifiers, MATHS, MATHS_ANSWER)
    assert verifiers.maths == [("2", r"The answer is \boxed{2}.")]


def test_the_judge_gets_the_source_its_language_the_tests_and_the_group():
    verifiers = Verifiers(judged(Verdict.OK, 2))
    grade(verifiers, CODE, CODE_ANSWER, group="12")
    (request,) = verifiers.code
    assert request.source.strip() == "print(3)"
    assert request.language is Language.PYTHON
    assert [tuple(test) for test in request.tests] == [("1 2", "3"), ("2 2", "4")]
    assert (request.problem_id, request.group, request.num_tests) == (CODE.id, "12", 20)


def test_a_problem_that_asks_for_cpp_is_judged_as_cpp_whatever_the_tag_says():
    verifiers = Verifiers(judged(Verdict.COMPILE_ERROR))
    problem = problem_of(
        kind=Kind.CODE, tests=CODE.tests, reference="", code_language=CodeLanguage.CPP
    )
    reward = grade(verifiers, problem, CODE_ANSWER)
    assert verifiers.code[0].language is Language.CPP
    assert reward.correctness == 0.0


def test_a_language_that_nobody_can_run_is_wrong_and_not_judged():
    verifiers = Verifiers()
    problem = problem_of(kind=Kind.CODE, tests=CODE.tests, reference="", code_language=None)
    reward = grade(verifiers, problem, CODE_ANSWER.replace("python", "cobol"))
    assert verifiers.code == []
    assert (reward.status, reward.correctness) == (GradeStatus.GRADED, 0.0)
    assert "cobol" in reward.detail


def test_passing_some_tests_pays_nothing_by_default_and_its_share_in_the_ablation():
    some = judged(Verdict.WRONG_ANSWER, num_passed=1)
    assert grade(Verifiers(some), CODE, CODE_ANSWER).correctness == 0.0
    share = grade(Verifiers(some), CODE, CODE_ANSWER, proportional_code=True)
    assert share.correctness == pytest.approx(0.45)


def test_the_ablation_needs_every_test_run():
    verifiers = Verifiers(judged(Verdict.WRONG_ANSWER, num_passed=1))
    grade(verifiers, CODE, CODE_ANSWER)
    grade(verifiers, CODE, CODE_ANSWER, proportional_code=True)
    assert [request.stop_at_first_failure for request in verifiers.code] == [True, False]


@pytest.mark.parametrize(
    ("problem", "text", "result"),
    [
        (MATHS, MATHS_ANSWER, MathResult(MathVerdict.INTERNAL, "worker died")),
        (MATHS, MATHS_ANSWER, MathResult(MathVerdict.UNREADABLE_REFERENCE, "what?")),
        (CODE, CODE_ANSWER, judged(Verdict.INFRASTRUCTURE)),
    ],
    ids=["maths-internal", "maths-reference", "code"],
)
def test_a_fault_of_the_verifier_masks_the_completion(problem, text, result):
    reward = grade(Verifiers(result), problem, text)
    assert reward.status is GradeStatus.INFRASTRUCTURE
    assert reward.detail
