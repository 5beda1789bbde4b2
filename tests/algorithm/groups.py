"""Builders of prompt groups for the tests of the algorithm."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_magistral.types import (
    Completion,
    FinishReason,
    Graded,
    GradeStatus,
    Group,
    Kind,
    Problem,
    Reward,
    Span,
)

PROBLEM = Problem(
    id="p0", kind=Kind.MATHS, category="sum", language="en", statement="Add.", reference="3"
)


def member(reward: float | None, num_tokens: int = 3) -> Graded:
    """A completion of `num_tokens` tokens; reward None means that its verifier failed."""
    completion = Completion(
        prompt_ids=(1, 2),
        output_ids=tuple(range(num_tokens)),
        logprobs=tuple(-0.5 for _ in range(num_tokens)),
        spans=(Span(version=0, start=0, end=num_tokens),),
        finish_reason=FinishReason.STOP,
        text="",
    )
    if reward is None:
        status = GradeStatus.INFRASTRUCTURE
        return Graded(completion, Reward(0.0, 0.0, 0.0, 0.0, status=status))
    return Graded(completion, Reward(format=0.0, correctness=reward, language=0.0, length=0.0))


def group(
    rewards: Sequence[float | None], lengths: Sequence[int] | None = None, ordinal: int = 0
) -> Group:
    lengths = lengths or [3] * len(rewards)
    members = tuple(map(member, rewards, lengths))
    return Group(ordinal=ordinal, problem=PROBLEM, members=members)
