"""What a simulated run comes to: throughput, idle shares, staleness, queue and caches. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from megatron_magistral.analysis.pipeline_model import Speeds, Step, Totals, Trace

HOUR_S = 3600.0


@dataclass(frozen=True)
class Outlook:
    """Means over the steps after the warm-up, unless said otherwise. Shares are of time.

    Ages are those of trained tokens, in policy versions at the hand-over, as in a run's metrics.
    """

    steps_per_h: float
    trained_tokens_per_s: float
    """Completions' tokens; prompts are not counted."""
    generated_tokens_per_s: float
    generator_idle: float
    """Share of time in which generators have nothing to run."""
    generator_paused: float
    """Share of time in which they stand still while new weights arrive."""
    running: float
    """Completions that run at once."""
    trainer_idle: float
    """Share of time in which the trainer waits for a batch."""
    verifier_idle: float | None
    """Of a verifier; None if their number is not bounded."""
    staleness_mean: float
    staleness_max: int
    """Oldest token of the whole run."""
    queue: float
    """Completions that wait for the trainer."""
    kv_tokens: float
    """In the caches of all generators, prompts included."""
    kv_tokens_peak: float

    @property
    def step_s(self) -> float:
        return HOUR_S / self.steps_per_h


def outlook(trace: Trace, speeds: Speeds, *, num_warm_up: int) -> Outlook:
    """`num_warm_up` steps at the start are left out. Raises ValueError if none are left."""
    if not 1 <= num_warm_up < len(trace.steps):
        raise ValueError(
            f"num_warm_up = {num_warm_up}: must be from 1 to {len(trace.steps) - 1}, as "
            f"{len(trace.steps)} steps were simulated"
        )
    first, last = trace.steps[num_warm_up - 1], trace.steps[-1]
    seconds = last.finished_at - first.finished_at
    spent = _between(first.totals, last.totals)
    counted = trace.steps[num_warm_up:]
    num_tokens = sum(sum(group.lengths) for step in counted for group in step.groups)
    ages, _ = token_ages(trace, counted)
    _, oldest = token_ages(trace, trace.steps)
    verifiers = speeds.num_verifiers
    return Outlook(
        steps_per_h=len(counted) / seconds * HOUR_S,
        trained_tokens_per_s=num_tokens / seconds,
        generated_tokens_per_s=spent.generated / seconds,
        generator_idle=spent.idle / seconds,
        generator_paused=spent.paused / seconds,
        running=spent.running / seconds,
        trainer_idle=_rest(spent.training / seconds),
        verifier_idle=None if verifiers is None else _rest(spent.verifying / seconds / verifiers),
        staleness_mean=ages,
        staleness_max=oldest,
        queue=spent.waiting / seconds,
        kv_tokens=spent.kv_tokens / seconds,
        kv_tokens_peak=trace.peak_kv_tokens,
    )


def token_ages(trace: Trace, steps: tuple[Step, ...]) -> tuple[float, int]:
    """(mean, greatest) age of the tokens of these steps: the version that was trained when their
    batch was handed over, less the version that sampled them."""
    size = trace.settings.group_size
    members = np.arange(size)
    completions = np.concatenate(
        [group.ordinal * size + members for step in steps for group in step.groups]
    )
    trained_at = np.repeat([step.version for step in steps for _ in step.groups], size)
    starts = np.array(trace.starts)[completions]
    lengths = np.array(trace.lengths)[completions]
    updates = np.array(trace.updates)
    # Version as a function of progress is a stair; the area below it is linear between updates.
    corners = np.concatenate([[0.0], updates])
    areas = np.concatenate([[0.0], np.cumsum(np.diff(corners) * np.arange(len(updates)))])

    def area(progress: np.ndarray) -> np.ndarray:
        version = np.searchsorted(updates, progress, side="right")
        return areas[version] + (progress - corners[version]) * version

    sampled = area(starts + lengths) - area(starts)  # sum over tokens of their version
    total = lengths.sum()
    # Rounding may leave a little less than nothing.
    mean = max(0.0, float((trained_at * lengths - sampled).sum() / total)) if total else 0.0
    oldest = trained_at - np.searchsorted(updates, starts, side="right")
    return mean, int(oldest.max())


def _rest(share: float) -> float:
    """Of the whole; sums of many seconds may be a little too large for it."""
    return max(0.0, 1.0 - share)


def _between(first: Totals, last: Totals) -> Totals:
    names = [field.name for field in fields(Totals)]
    return Totals(**{name: getattr(last, name) - getattr(first, name) for name in names})
