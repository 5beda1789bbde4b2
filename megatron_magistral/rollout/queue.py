"""The bounded queue between generators and trainers, and the admission that it implies (section 3).

Life of a group:

    admit -> in flight -> waiting -> taken by the trainer
                     \\-> dropped (all rewards equal) or failed (could not be graded)

Invariants, each a test:
 1. At most `n_async` sequences are in flight; while the rules below allow it they are kept full.
 2. At most `n_async + capacity` sequences are admitted and not yet taken: when trainers lag,
    generators are held back. So a sequence is trained (n_async + capacity) / n_batch steps after
    its admission on average at most.
 3. With `max_staleness`, a group admitted while generators hold version v is due in step
    v + max_staleness, and is trained by then: no token of it is older when it is trained.
    A group is admitted only if all that are outstanding can still be trained in time, whatever
    finishes when. A batch goes out only if all that are left can be trained in time after it; else
    it waits for the group that is due first. With 0, generation and training take turns.
 4. Every admitted group leaves exactly once, as taken, dropped or failed, the one that is due first
    before others. Nothing is discarded for being slow or old, so the lengths trained on are the
    lengths sampled.

Why this cannot deadlock: if every group that is outstanding can be trained in time, then so they
can after the n_batch that are due first have been taken, as each of the others moves up by a step;
and a batch that consists of those never waits for anything.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from megatron_magistral.rollout.clocks import StateClock
from megatron_magistral.rollout.events import Outcome
from megatron_magistral.types import Group

__all__ = ["Admission", "GroupQueue", "NothingToLearn", "Outcome", "QueueLimits"]


class Gate(StrEnum):
    """What decides whether another group is admitted."""

    OPEN = "open"
    FULL = "full"  # n_async sequences are in flight: generators have what they can use
    CAPACITY = "capacity"  # trainers lag: as much waits for them as may
    STALENESS = "staleness"  # trainers lag: a new group could be trained too late


class NothingToLearn(RuntimeError):
    """So many groups in a row were dropped or failed that a batch cannot be expected to fill."""


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """Counts of sequences, of groups where it says so, and of trainer steps (`max_staleness`)."""

    n_async: int
    capacity: int
    group_size: int
    groups_per_batch: int
    max_barren_groups: int
    """So many in a row, dropped or failed, are NothingToLearn."""
    max_staleness: int | None = None


@dataclass(frozen=True)
class Admission:
    """A new group: its number, what generators held, and the last step that may train it."""

    ordinal: int
    version: int
    due: int | None


class GroupQueue:
    """Admission and hand-over of groups. One event loop, no threads."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._version = -1  # no weights yet
        self._step = 0
        self._in_flight = 0
        self._next_ordinal = 0
        self._due: dict[int, int | None] = {}  # of every group that is outstanding
        self._waiting: dict[int, Group] = {}
        self._repeated: deque[Callable[[], tuple[Group, ...]]] = deque()
        self._barren = 0
        self._last_reason = ""
        self._changed = asyncio.Condition()
        self._gate_clock = StateClock(Gate.OPEN)
        self.outcomes: Counter[Outcome] = Counter()

    @property
    def next_ordinal(self) -> int:
        """Of the group that is admitted next."""
        return self._next_ordinal

    async def set_limits(self, limits: QueueLimits) -> None:
        """Admit and hand over by these from now on. What is outstanding stays, also where it is
        more than the new limits would admit."""
        self._limits = limits  # before anyone else runs: no group is admitted by the former ones
        async with self._changed:
            self._changed.notify_all()

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for the trainer."""
        return len(self._waiting) * self._limits.group_size

    @property
    def num_in_flight(self) -> int:
        """Sequences that generators work on."""
        return self._in_flight

    @property
    def num_repeated(self) -> int:
        """Batches that are handed out again before new ones."""
        return len(self._repeated)

    def restore(
        self,
        step: int,
        next_ordinal: int,
        *,
        repeated: Iterable[Callable[[], tuple[Group, ...]]] = (),
        waiting: Iterable[tuple[Group, int | None]] = (),
        unfinished: Iterable[tuple[Admission, int]] = (),
    ) -> None:
        """Go on, before anything is admitted, where another process left off.

        `repeated` are the batches of `step` and those after it as they were taken before,
        `waiting` finished groups with the steps they are due in, `unfinished` admissions and how
        many of their sequences generators have to work on.
        """
        self._step, self._next_ordinal = step, next_ordinal
        self._repeated.extend(repeated)
        for group, due in waiting:
            self._due[group.ordinal] = due
            self._waiting[group.ordinal] = group
        for admission, num_sequences in unfinished:
            self._due[admission.ordinal] = admission.due
            self._in_flight += num_sequences

    async def weights_changed(self, version: int) -> None:
        """Generators hold `version` now."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def wait_for_version(self, version: int) -> None:
        """Wait until generators hold `version` or a newer one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version >= version)

    async def admit(self) -> Admission:
        """Wait until a group may be admitted; its sequences are then in flight."""
        async with self._changed:
            await self._changed.wait_for(self._may_admit)
            admission = Admission(self._next_ordinal, self._version, self._due_if_admitted())
            self._next_ordinal += 1
            self._due[admission.ordinal] = admission.due
            self._in_flight += self._limits.group_size
            return admission

    async def sequence_done(self) -> None:
        """One sequence left the generators (it may still be graded)."""
        async with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()

    async def put(self, group: Group) -> None:
        """Queue a graded, diverse group for training."""
        async with self._changed:
            self._check_open(group.ordinal)
            self._waiting[group.ordinal] = group
            self._barren = 0
            self._changed.notify_all()

    async def leave(self, ordinal: int, outcome: Outcome, reason: str = "") -> None:
        """Count a group out that will not be trained."""
        async with self._changed:
            self._check_open(ordinal)
            del self._due[ordinal]
            self._last_reason = f"{outcome}: {reason}"
            self.outcomes[outcome] += 1
            self._barren += 1
            self._changed.notify_all()

    async def take(self) -> tuple[Group, ...]:
        """Wait for the batch of the next step and hand it over, in the order it is due in.

        Raises NothingToLearn when too many groups in a row were dropped or failed.
        """
        async with self._changed:
            if self._repeated:
                groups = self._repeated.popleft()()
            else:
                groups = await self._take_new()
            self.outcomes[Outcome.TAKEN] += len(groups)
            self._step += 1
            self._changed.notify_all()
            return groups

    def drain_admission(self) -> dict[str, float]:
        """What held admission back, as shares of the time since this was last asked. `full` is as
        it should be; `capacity` and `staleness` hold generators back."""
        return {f"admission_{gate}": share for gate, share in self._gate_clock.drain().items()}

    def describe(self) -> str:
        """What the next batch waits for."""
        first = next((o for o in self._by_due() if o not in self._waiting), None)
        due = None if first is None else self._due[first]
        return (
            f"step {self._step}: {len(self._waiting)} of {self._limits.groups_per_batch} groups "
            f"are ready, {len(self._due) - len(self._waiting)} are with generators and verifiers"
            + ("" if first is None else f", first of them group {first}")
            + ("" if due is None else f", due {due}")
        )

    async def _take_new(self) -> tuple[Group, ...]:
        await self._changed.wait_for(
            lambda: self._choice() or self._barren >= self._limits.max_barren_groups
        )
        chosen = self._choice()
        if not chosen:
            counts = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.items())
            raise NothingToLearn(
                f"{self._barren} prompt groups in a row gave nothing to train on ({counts} so far; "
                f"the last one {self._last_reason}): the problems are all too easy or all too hard "
                "for this model, or the verifiers fail"
            )
        for ordinal in chosen:
            del self._due[ordinal]
        return tuple(self._waiting.pop(ordinal) for ordinal in chosen)

    def _may_admit(self) -> bool:
        gate = self._gate()
        self._gate_clock.enter(gate)
        return gate is Gate.OPEN

    def _gate(self) -> Gate:
        limits = self._limits
        outstanding = len(self._due) * limits.group_size
        if self._in_flight + limits.group_size > limits.n_async:
            return Gate.FULL
        if outstanding + limits.group_size > limits.n_async + limits.capacity:
            return Gate.CAPACITY
        due = self._due_if_admitted()
        # A group that is late already is no reason to admit none: its batch may need another.
        if due is None or self._in_time(
            [*self._due.values(), due], self._step + len(self._repeated), from_due=due
        ):
            return Gate.OPEN
        return Gate.STALENESS

    def _due_if_admitted(self) -> int | None:
        bound = self._limits.max_staleness
        return None if bound is None else self._version + bound

    def _choice(self) -> list[int]:
        """The groups of the next batch; none while it has to wait."""
        size = self._limits.groups_per_batch
        if len(self._waiting) < size:
            return []
        order = self._by_due()
        chosen = [ordinal for ordinal in order if ordinal in self._waiting][:size]
        out = set(chosen)
        left = (due for ordinal, due in self._due.items() if ordinal not in out)
        if chosen == order[:size] or self._in_time(left, self._step + 1):
            return chosen
        return []

    def _by_due(self) -> list[int]:
        """Outstanding groups, first those that are due first, then the oldest."""

        def urgency(ordinal: int) -> tuple[float, int]:
            due = self._due[ordinal]
            return (math.inf if due is None else due, ordinal)

        return sorted(self._due, key=urgency)

    def _in_time(self, dues: Iterable[int | None], first_step: int, *, from_due: int = -1) -> bool:
        """Whether groups that are due in these steps can be, in batches from `first_step` on; asked
        of those alone that are due in `from_due` or later."""
        size = self._limits.groups_per_batch
        ordered = sorted(due for due in dues if due is not None)
        return all(
            due >= first_step + i // size for i, due in enumerate(ordered) if due >= from_due
        )

    def _check_open(self, ordinal: int) -> None:
        if ordinal not in self._due or ordinal in self._waiting:
            raise ValueError(f"group {ordinal} is not open: it already left the queue")
