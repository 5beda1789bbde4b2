"""From a completion to its reward: the gate here, the verdict from the verifier service."""

from __future__ import annotations

from megatron_magistral.rewards.format import GateResult, gate, submission_language
from megatron_magistral.rewards.language import LanguageIdentifier, language_agreement
from megatron_magistral.rewards.settings import RewardSettings
from megatron_magistral.rewards.total import Grade, gate_failure, total
from megatron_magistral.types import Completion, GradeStatus, Kind, Problem, Reward
from verifier_sandbox.client import VerifierClient
from verifier_sandbox.mathcheck import MathVerdict
from verifier_sandbox.protocol import JudgeRequest, Language, Test, Verdict

# A verifier that could not do its work says nothing about the answer.
_MATHS_FAULTS = (MathVerdict.INTERNAL, MathVerdict.UNREADABLE_REFERENCE)


class RewardGrader:
    """Grades completions of one run. Nothing that a model wrote runs in this process."""

    def __init__(
        self,
        verifiers: VerifierClient,
        identifier: LanguageIdentifier,
        settings: RewardSettings,
        *,
        num_code_tests: int,
    ) -> None:
        self._verifiers = verifiers
        self._identifier = identifier
        self._settings = settings
        self._num_code_tests = num_code_tests

    async def __call__(self, problem: Problem, completion: Completion, group: str) -> Reward:
        """The reward; GradeStatus.INFRASTRUCTURE when no verifier could tell (see VerifierClient).

        Raises VerifiersDown when none has answered anything for too long.
        """
        gated = gate(problem, completion.text)
        if not gated.passed:
            return gate_failure(gated)
        grade = await self._grade(problem, gated, group)
        agreement = language_agreement(
            self._identifier, problem.statement, gated.thoughts, gated.answer
        )
        return total(problem, grade, agreement, len(completion.output_ids), self._settings)

    async def _grade(self, problem: Problem, gated: GateResult, group: str) -> Grade:
        if problem.kind is Kind.MATHS:
            return await self._grade_maths(problem, gated)
        return await self._grade_code(problem, gated, group)

    async def _grade_maths(self, problem: Problem, gated: GateResult) -> Grade:
        result = await self._verifiers.check_maths(problem.reference, gated.answer)
        detail = f"{result.verdict.value}: {result.reason}"
        if result.verdict in _MATHS_FAULTS:
            return Grade(0.0, GradeStatus.INFRASTRUCTURE, detail)
        return Grade(float(result.verdict is MathVerdict.CORRECT), detail=detail)

    async def _grade_code(self, problem: Problem, gated: GateResult, group: str) -> Grade:
        language = submission_language(problem, gated)
        if language is None:
            return Grade(0.0, detail=f"unknown language {gated.tag!r}")
        result = await self._verifiers.judge(
            JudgeRequest(
                language=Language(language.value),
                source=gated.submission,
                tests=[Test(input=test.input, output=test.output) for test in problem.tests],
                problem_id=problem.id,
                group=group,
                num_tests=self._num_code_tests,
                stop_at_first_failure=not self._settings.proportional_code,
            )
        )
        if result.verdict is Verdict.INFRASTRUCTURE:
            return Grade(0.0, GradeStatus.INFRASTRUCTURE, result.detail)
        if result.verdict is Verdict.OK:
            return Grade(1.0, detail=result.verdict)
        return Grade(min(result.num_passed / result.num_tests, 1.0), detail=result.verdict)
