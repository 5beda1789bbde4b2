"""The reward of one completion: format + correctness + language + length (section 2.2).

    gate(problem, text) -> verifier grades gate.submission -> total(...)

The first and the last step are pure; the verifier between them is asked only if the gate passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_magistral.rewards.format import GateResult
from megatron_magistral.rewards.language import LanguageAgreement
from megatron_magistral.rewards.length import length_reward
from megatron_magistral.rewards.settings import RewardSettings
from megatron_magistral.types import GradeStatus, Kind, Problem, Reward


@dataclass(frozen=True)
class Grade:
    """What a verifier said about a submission.

    `passed_fraction` is 1 or 0 for maths and the share of tests passed for code. With status
    INFRASTRUCTURE there is no verdict and the fraction means nothing. `detail` is for logs.

    Raises ValueError if the fraction is not in [0, 1].
    """

    passed_fraction: float
    status: GradeStatus = GradeStatus.GRADED
    detail: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.passed_fraction <= 1:
            raise ValueError(f"passed_fraction = {self.passed_fraction}: must be in [0, 1]")


def gate_failure(result: GateResult) -> Reward:
    """Reward 0 on every axis, naming the rule that was broken."""
    return Reward(format=0.0, correctness=0.0, language=0.0, length=0.0, detail=result.status.value)


def total(
    problem: Problem,
    grade: Grade,
    language: LanguageAgreement,
    num_output_tokens: int,
    settings: RewardSettings,
) -> Reward:
    """The reward of a completion that passed the gate.

    A verifier that failed gives status INFRASTRUCTURE: the completion is masked, never paid 0.
    """
    if grade.status is GradeStatus.INFRASTRUCTURE:
        return Reward(
            format=0.0,
            correctness=0.0,
            language=0.0,
            length=0.0,
            status=GradeStatus.INFRASTRUCTURE,
            detail=grade.detail,
        )
    proportional = settings.proportional_code and problem.kind is Kind.CODE
    share = grade.passed_fraction if proportional else float(grade.passed_fraction == 1)
    return Reward(
        format=settings.format,
        correctness=settings.correctness * share,
        language=settings.language if language is LanguageAgreement.AGREE else 0.0,
        length=length_reward(
            num_output_tokens,
            l_max=settings.l_max,
            l_cache=settings.l_cache,
            penalty=settings.length_penalty,
        ),
        passed_fraction=grade.passed_fraction,
        detail=grade.detail,
    )
