"""Small stand-ins for the parts at the other side of a seam, and makers of valid values."""

from __future__ import annotations

from megatron_magistral.types import (
    Completion,
    FinishReason,
    Graded,
    Group,
    Kind,
    Problem,
    Reward,
    Span,
)


def problem_of(statement: str = "What is 1 + 1?", **changes) -> Problem:
    values = {
        "id": "p1",
        "kind": Kind.MATHS,
        "category": "maths/numeric",
        "language": "en",
        "statement": statement,
        "reference": "2",
    }
    return Problem(**(values | changes))


def completion_of(num_tokens: int = 3, *, version: int = 0, text: str = "") -> Completion:
    return Completion(
        prompt_ids=(1, 2),
        output_ids=tuple(range(3, 3 + num_tokens)),
        logprobs=(-0.5,) * num_tokens,
        spans=(Span(version, 0, num_tokens),) if num_tokens else (),
        finish_reason=FinishReason.STOP,
        text=text,
    )


def graded_of(reward: float = 0.0, num_tokens: int = 3, **changes) -> Graded:
    values = {"format": 0.0, "correctness": reward, "language": 0.0, "length": 0.0}
    return Graded(completion_of(num_tokens), Reward(**(values | changes)))


def group_of(ordinal: int = 0, *, size: int = 4, rewards: tuple[float, ...] = ()) -> Group:
    rewards = rewards or (1.0,) + (0.0,) * (size - 1)
    return Group(ordinal, problem_of(), tuple(graded_of(reward) for reward in rewards))
