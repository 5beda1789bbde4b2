"""A discrete-event model of the asynchronous pipeline: lengths, staleness and speed.

    admit -> in flight (one token per time unit and completion) -> waiting -> trained
                                                                       \\-> discarded (a baseline)

Admission is that of the bounded queue: at most `n_async` completions in flight, and at most
`n_async + queue_capacity` admitted but not yet trained. The trainer takes groups in order of
completion, works `train_time`, and every trained batch is a new policy version (section 3).

It is there to ask which hand-over keeps the lengths trained on equal to the lengths sampled,
for any `n_async / n_batch`, and what a bound on staleness costs.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

SampleLength = Callable[[random.Random], float]
"""Draws the length of one completion, in tokens."""


class Handover(StrEnum):
    """How the trainer picks the groups of a step."""

    KEEP = "keep"
    """Whatever completed first; a slow group waits for its turn however stale it gets."""
    BOUNDED = "bounded"
    """Oldest first, and the trainer waits for a slow group that it could not train in time else."""
    DISCARD_STALE = "discard_stale"
    """The baseline: a group older than the bound is thrown away when its turn comes."""


@dataclass(frozen=True)
class Settings:
    """Counts are completions; `max_staleness` is in policy versions and unused by KEEP.

    Raises ValueError for counts that cannot fill a batch of whole groups, or keep the bound.
    """

    n_async: int
    n_batch: int
    queue_capacity: int
    group_size: int
    train_time: float
    handover: Handover = Handover.KEEP
    max_staleness: int = 1

    def __post_init__(self) -> None:
        for name in ("n_async", "n_batch", "queue_capacity"):
            if getattr(self, name) % self.group_size != 0:
                raise ValueError(
                    f"{name} = {getattr(self, name)}: must be a multiple of "
                    f"group_size = {self.group_size}"
                )
        if self.n_async + self.queue_capacity < self.n_batch:
            raise ValueError(
                f"n_async + queue_capacity = {self.n_async + self.queue_capacity}: must be at "
                f"least n_batch = {self.n_batch}, or no batch is ever full"
            )
        num_steps = (self.n_async + self.queue_capacity) / self.n_batch
        if self.handover is Handover.BOUNDED and self.max_staleness < num_steps:
            raise ValueError(
                f"max_staleness = {self.max_staleness}: must be at least "
                f"(n_async + queue_capacity) / n_batch = {num_steps:g}"
            )


@dataclass(frozen=True)
class SimulatedGroup:
    ordinal: int
    version: int
    """Policy version at admission."""
    lengths: tuple[float, ...]


@dataclass(frozen=True)
class Step:
    """One trained batch; staleness of a group is the number of versions since its admission."""

    finished_at: float
    groups: tuple[SimulatedGroup, ...]
    staleness: tuple[int, ...]


@dataclass
class _State:
    clock: float = 0.0
    version: int = 0
    training_until: float | None = None
    completions_in_flight: int = 0
    in_flight: dict[int, SimulatedGroup] = field(default_factory=dict)
    waiting: list[SimulatedGroup] = field(default_factory=list)
    num_admitted: int = 0
    ends: list[tuple[float, int]] = field(default_factory=list)
    """Heap of (time, ordinal), one per completion in flight."""
    unfinished: dict[int, int] = field(default_factory=dict)
    """Completions still in flight, by ordinal."""


def simulate(
    settings: Settings, sample_length: SampleLength, *, num_steps: int, seed: int
) -> tuple[Step, ...]:
    """Runs until `num_steps` batches are trained. Deterministic by seed."""
    rng = random.Random(seed)
    state = _State()
    steps: list[Step] = []
    batch: tuple[SimulatedGroup, ...] = ()
    while len(steps) < num_steps:
        _admit(state, settings, sample_length, rng)
        if state.training_until is None and (batch := _take(state, settings)):
            state.training_until = state.clock + settings.train_time
            continue  # room was made: admit at this very moment
        if state.training_until is not None and _trains_next(state):
            state.clock, state.training_until = state.training_until, None
            staleness = tuple(state.version - group.version for group in batch)
            steps.append(Step(state.clock, batch, staleness))
            state.version += 1
        else:
            _finish_one_completion(state)
    return tuple(steps)


def _admit(
    state: _State, settings: Settings, sample_length: SampleLength, rng: random.Random
) -> None:
    size = settings.group_size
    limit = settings.n_async + settings.queue_capacity
    while (
        state.completions_in_flight + size <= settings.n_async
        and (len(state.in_flight) + len(state.waiting) + 1) * size <= limit
    ):
        lengths = tuple(sample_length(rng) for _ in range(size))
        group = SimulatedGroup(state.num_admitted, state.version, lengths)
        state.num_admitted += 1
        state.in_flight[group.ordinal] = group
        state.unfinished[group.ordinal] = size
        state.completions_in_flight += size
        for length in lengths:
            heapq.heappush(state.ends, (state.clock + length, group.ordinal))


def _trains_next(state: _State) -> bool:
    assert state.training_until is not None
    return not state.ends or state.training_until <= state.ends[0][0]


def _finish_one_completion(state: _State) -> None:
    state.clock, ordinal = heapq.heappop(state.ends)
    state.completions_in_flight -= 1
    state.unfinished[ordinal] -= 1
    if state.unfinished[ordinal] == 0:
        del state.unfinished[ordinal]
        state.waiting.append(state.in_flight.pop(ordinal))


def _take(state: _State, settings: Settings) -> tuple[SimulatedGroup, ...]:
    """The groups of the next step, or none if the trainer has to wait."""
    num_groups = settings.n_batch // settings.group_size
    oldest = state.version - settings.max_staleness
    if settings.handover is Handover.DISCARD_STALE:
        state.waiting = [group for group in state.waiting if group.version >= oldest]
    elif settings.handover is Handover.BOUNDED:
        state.waiting.sort(key=lambda group: group.ordinal)
    taken, left = state.waiting[:num_groups], state.waiting[num_groups:]
    if len(taken) < num_groups:
        return ()
    if settings.handover is Handover.BOUNDED and not _all_in_time(
        [*left, *state.in_flight.values()], oldest, num_groups
    ):
        return ()
    state.waiting = left
    return tuple(taken)


def _all_in_time(left: list[SimulatedGroup], oldest: int, num_groups: int) -> bool:
    """Whether those left after this step can all be trained within the bound, oldest first.

    Groups of version `oldest` are due in this step, those of the next version one step later.
    """
    versions = sorted(group.version for group in left)
    return all(version - oldest > i // num_groups for i, version in enumerate(versions))
