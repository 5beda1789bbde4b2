"""From verified groups to the batch that trainer ranks pull (arXiv 2506.10910, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_magistral.algorithm.advantage import minibatch_sequences
from megatron_magistral.algorithm.permutation import preset_ranks
from megatron_magistral.algorithm.settings import AlgorithmSettings
from megatron_magistral.types import Batch, Group, Minibatch


def make_batch(
    step: int,
    groups: Sequence[Group],
    settings: AlgorithmSettings,
    *,
    num_ranks: int,
    seed: int,
) -> Batch:
    """Cuts the groups of step `step`, in the given order, into minibatches of whole groups.

    Advantages and denominators belong to one minibatch, since each is one optimizer step.

    Raises ValueError if the groups do not divide evenly, or are of different sizes.
    """
    count = settings.num_minibatches
    if not groups or len(groups) % count != 0:
        raise ValueError(
            f"step {step}: {len(groups)} groups in {count} minibatches: "
            "the number of groups must be a positive multiple of num_minibatches"
        )
    sizes = {len(group.members) for group in groups}
    if len(sizes) > 1:
        raise ValueError(f"step {step}: groups of {sorted(sizes)} members: all must be equal")
    size = len(groups) // count
    minibatches = tuple(
        _minibatch(step * count + i, groups[i * size : (i + 1) * size], settings, num_ranks, seed)
        for i in range(count)
    )
    return Batch(
        step=step, minibatches=minibatches, ordinals=tuple(group.ordinal for group in groups)
    )


def _minibatch(
    optimizer_step: int,
    groups: Sequence[Group],
    settings: AlgorithmSettings,
    num_ranks: int,
    seed: int,
) -> Minibatch:
    sequences = minibatch_sequences(
        groups,
        normalise_advantage=settings.normalise_advantage,
        normalise_loss=settings.normalise_loss,
    )
    return Minibatch(
        sequences=sequences,
        ranks=preset_ranks(optimizer_step, len(sequences), num_ranks, seed),
    )
