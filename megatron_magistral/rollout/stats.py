"""What the rollout side did since the last step, as the metrics of that step."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

from megatron_magistral.algorithm.collate import collation_report, padding_fraction
from megatron_magistral.rollout.clocks import WaitClock
from megatron_magistral.types import (
    Batch,
    FinishReason,
    Graded,
    GradeStatus,
    Group,
    TrainSequence,
)


class RolloutStats:
    """Collects graded completions; `drain` reduces and forgets them. `grading` takes how long each
    completion waited for its verdict."""

    def __init__(self) -> None:
        self.grading = WaitClock()
        self._graded: list[Graded] = []
        self._groups: Counter[str] = Counter()
        self._since = time.monotonic()

    def add(self, members: Sequence[Graded], outcome: str) -> None:
        """Count one finished group, whatever becomes of it."""
        self._graded.extend(members)
        self._groups[outcome] += 1

    def drain(self) -> dict[str, float]:
        now = time.monotonic()
        metrics = _completion_metrics(self._graded, now - self._since)
        metrics |= {f"groups_{name}": float(count) for name, count in self._groups.items()}
        metrics |= self.grading.drain("verifier_wait")
        self._graded = []
        self._groups = Counter()
        self._since = now
        return metrics


def _completion_metrics(graded: Sequence[Graded], elapsed_s: float) -> dict[str, float]:
    rewarded = [item for item in graded if item.reward.status is GradeStatus.GRADED]
    metrics = {"masked_completions": float(len(graded) - len(rewarded))}
    lengths = [len(item.completion.output_ids) for item in graded]
    if elapsed_s > 0:
        metrics["generated_tokens_per_s"] = sum(lengths) / elapsed_s
    if not rewarded:
        return metrics
    count = len(rewarded)
    for axis in ("format", "correctness", "language", "length"):
        metrics[f"reward_{axis}"] = sum(getattr(item.reward, axis) for item in rewarded) / count
    truncated = sum(item.completion.finish_reason is FinishReason.LENGTH for item in graded)
    return metrics | {
        "reward_mean": sum(item.reward.total for item in rewarded) / count,
        "solved": sum(item.reward.is_solved for item in rewarded) / count,
        "completion_tokens_mean": sum(lengths) / len(lengths),
        "completion_tokens_max": float(max(lengths)),
        "truncated": truncated / len(graded),
    }


def staleness_metrics(sequences: Sequence[TrainSequence], version: int) -> dict[str, float]:
    """Age of the trained tokens in policy versions, at the moment the batch is handed over."""
    ages: Counter[int] = Counter()
    for sequence in sequences:
        for span in sequence.spans:
            ages[version - span.version] += span.end - span.start
    num_tokens = sum(ages.values())
    mixed = sum(len(sequence.spans) > 1 for sequence in sequences)
    return {
        "staleness_mean": sum(age * count for age, count in ages.items()) / max(1, num_tokens),
        "staleness_max": float(max(ages, default=0)),
        "mixed_version_sequences": mixed / max(1, len(sequences)),
    }


def padding_metrics(batch: Batch, max_tokens: int) -> dict[str, float]:
    """Share of empty slots in microbatches of `max_tokens`, for greedy collation as the trainer
    does it and for the baselines it is compared with (section 3). All ranks together."""
    lengths_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, minibatch in enumerate(batch.minibatches):
        for sequence, rank in zip(minibatch.sequences, minibatch.ranks, strict=True):
            lengths_of[index, rank].append(len(sequence.tokens))
    reports = [collation_report(lengths, max_tokens) for lengths in lengths_of.values()]
    num_tokens = sum(report.num_tokens for report in reports)
    return {
        f"padding_{method}": padding_fraction(
            [num_tokens], sum(getattr(report, method) for report in reports), max_tokens
        )
        for method in ("greedy", "sequential_fill", "unsorted_first_fit", "lower_bound")
    }


def spread(groups: Sequence[Group], count: int) -> Iterator[tuple[Group, int]]:
    """At most `count` members as (group, index): the first of every group, then the second."""
    size = len(groups[0].members) if groups else 0
    return islice(((group, index) for index in range(size) for group in groups), count)


def sample_row(group: Group, step: int, member: int = 0) -> dict[str, object]:
    """A completion of a group, for people to read and for `data/traces.py`."""
    graded = group.members[member]
    return {
        "step": step,
        "problem": group.problem.id,
        "category": group.problem.category,
        "language": group.problem.language,
        "statement": group.problem.statement,
        "response": graded.completion.text,
        "reward": graded.reward.total,
        "solved": graded.reward.is_solved,
        "detail": graded.reward.detail,
        "spans": [[span.version, span.start, span.end] for span in graded.completion.spans],
    }
