"""Advantages and loss denominators of one minibatch (arXiv 2506.10910, sections 2.1 and 6.4).

Invariants:

1. A group is judged diverse by exact equality of its rewards, before any arithmetic on them, and
   a uniform group is centred to exactly 0: the rounding of a mean must not become a signal.
2. A completion whose verifier failed has no reward. It is in no mean, no standard deviation and no
   denominator; it keeps its place in the minibatch with advantage 0 and weight 0.
3. An empty completion has a reward and votes like any other; it has no tokens to train.
4. The result does not depend on the order of groups or members: sums are exact (`math.fsum`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from megatron_magistral.algorithm.settings import NormaliseAdvantage, NormaliseLoss
from megatron_magistral.types import Graded, GradeStatus, Group, TrainSequence


class Diversity(StrEnum):
    """Whether a group can teach anything. Only DIVERSE groups are trained on."""

    DIVERSE = "diverse"
    UNIFORM = "uniform"
    """All graded members have the same reward: dropped by modification 5."""
    UNGRADED = "ungraded"
    """No member could be graded: failed, not dropped."""


def diversity(members: Sequence[Graded]) -> Diversity:
    """Decides over the whole group; members without a grade do not vote."""
    rewards = {member.reward.total for member in members if _is_graded(member)}
    if not rewards:
        return Diversity.UNGRADED
    return Diversity.DIVERSE if len(rewards) > 1 else Diversity.UNIFORM


def minibatch_sequences(
    groups: Sequence[Group],
    *,
    normalise_advantage: NormaliseAdvantage = NormaliseAdvantage.MINIBATCH,
    normalise_loss: NormaliseLoss = NormaliseLoss.GROUP,
) -> tuple[TrainSequence, ...]:
    """The completions of one minibatch, group after group, ready for a rank of the trainer.

    With these weights the loss is a plain sum over tokens, whatever the cut into microbatches and
    data-parallel ranks.
    """
    advantages = _advantages(groups, normalise_advantage)
    weights = _weights(groups, normalise_loss)
    return tuple(
        _train_sequence(member, advantage, weight)
        for group, group_advantages, group_weights in zip(groups, advantages, weights, strict=True)
        for member, advantage, weight in zip(
            group.members, group_advantages, group_weights, strict=True
        )
    )


def _advantages(groups: Sequence[Group], mode: NormaliseAdvantage) -> list[list[float]]:
    centred = [_centred(group.members) for group in groups]
    if mode is NormaliseAdvantage.MINIBATCH:
        graded = [_is_graded(member) for group in groups for member in group.members]
        flat = _standardised([a for members in centred for a in members], graded)
        values = iter(flat)
        return [[next(values) for _ in members] for members in centred]
    if mode is NormaliseAdvantage.GROUP:
        return [
            _standardised(advantages, [_is_graded(member) for member in group.members])
            for group, advantages in zip(groups, centred, strict=True)
        ]
    return centred


def _centred(members: Sequence[Graded]) -> list[float]:
    if diversity(members) is not Diversity.DIVERSE:
        return [0.0] * len(members)
    rewards = [member.reward.total for member in members if _is_graded(member)]
    mean = math.fsum(rewards) / len(rewards)
    return [member.reward.total - mean if _is_graded(member) else 0.0 for member in members]


def _standardised(values: Sequence[float], graded: Sequence[bool]) -> list[float]:
    """(value - mean) / population standard deviation of the graded; all 0 if they do not vary."""
    votes = [value for value, voter in zip(values, graded, strict=True) if voter]
    if not any(votes):  # centred values: all zero means that no group is diverse
        return [0.0] * len(values)
    mean = math.fsum(votes) / len(votes)
    std = math.sqrt(math.fsum((vote - mean) ** 2 for vote in votes) / len(votes))
    return [
        (value - mean) / std if voter else 0.0 for value, voter in zip(values, graded, strict=True)
    ]


def _weights(groups: Sequence[Group], mode: NormaliseLoss) -> list[list[float]]:
    lengths = [[_num_trained_tokens(member) for member in group.members] for group in groups]
    num_tokens = sum(map(sum, lengths))
    num_groups = sum(any(group) for group in lengths)
    num_sequences = sum(length > 0 for group in lengths for length in group)

    def denominator(length: int, group_length: int) -> int:
        match mode:
            case NormaliseLoss.GROUP:
                return num_groups * group_length
            case NormaliseLoss.TOKEN:
                return num_tokens
            case NormaliseLoss.SEQUENCE:
                return num_sequences * length

    return [
        [1 / denominator(length, sum(group)) if length else 0.0 for length in group]
        for group in lengths
    ]


def _train_sequence(member: Graded, advantage: float, weight: float) -> TrainSequence:
    completion = member.completion
    return TrainSequence(
        tokens=completion.prompt_ids + completion.output_ids,
        num_prompt_tokens=len(completion.prompt_ids),
        logprobs=completion.logprobs,
        spans=completion.spans,
        advantage=advantage,
        weight=weight,
    )


def _num_trained_tokens(member: Graded) -> int:
    return len(member.completion.output_ids) if _is_graded(member) else 0


def _is_graded(member: Graded) -> bool:
    return member.reward.status is GradeStatus.GRADED
