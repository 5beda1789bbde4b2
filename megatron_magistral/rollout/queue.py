"""The bounded queue between generators and trainers, and the admission that it implies (section 3).

Life of a group:

    admit -> in flight -> QUEUED -> taken by the trainer
                     \\-> DROPPED (all rewards equal) or FAILED (could not be graded)

Invariants, each a test:
 1. At most `n_async` sequences are in flight; while the queue has room they are kept full.
 2. At most `n_async + capacity` sequences are admitted and not yet taken: when trainers lag,
    generators are held back. So a sequence is trained (n_async + capacity) / n_batch steps after
    its admission on average at most. One alone may take longer, as long as it is generated for:
    others overtake it, and `staleness_max` in the metrics says by how much.
 3. Every admitted group leaves exactly once, as taken, dropped or failed. Nothing is discarded for
    being slow or old, so the lengths trained on are the lengths sampled.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from enum import StrEnum

from megatron_magistral.types import Group


class Outcome(StrEnum):
    TAKEN = "taken"
    DROPPED = "dropped"
    FAILED = "failed"


class NothingToLearn(RuntimeError):
    """So many groups in a row were dropped or failed that a batch cannot be expected to fill."""


class GroupQueue:
    """Admission and hand-over of groups of `group_size` sequences. One event loop, no threads."""

    def __init__(
        self, *, n_async: int, capacity: int, group_size: int, max_barren_groups: int
    ) -> None:
        self._n_async = n_async
        self._max_outstanding = n_async + capacity
        self._group_size = group_size
        self._max_barren_groups = max_barren_groups
        self._in_flight = 0
        self._waiting: deque[Group] = deque()
        self._open: set[int] = set()
        self._next_ordinal = 0
        self._barren = 0
        self._changed = asyncio.Condition()
        self.outcomes: Counter[Outcome] = Counter()

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for the trainer."""
        return len(self._waiting) * self._group_size

    @property
    def num_in_flight(self) -> int:
        """Sequences that generators work on."""
        return self._in_flight

    def start_at(self, ordinal: int) -> None:
        """Admit from this ordinal on: the groups before it belong to steps that are trained."""
        self._next_ordinal = ordinal

    async def admit(self) -> int:
        """Wait for room, then return the ordinal of a new group, its sequences now in flight."""
        async with self._changed:
            await self._changed.wait_for(self._has_room)
            ordinal = self._next_ordinal
            self._next_ordinal += 1
            self._open.add(ordinal)
            self._in_flight += self._group_size
            return ordinal

    async def sequence_done(self) -> None:
        """One sequence left the generators (it may still be graded)."""
        async with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()

    async def put(self, group: Group) -> None:
        """Queue a graded, diverse group for training."""
        async with self._changed:
            self._close(group.ordinal)
            self._waiting.append(group)
            self._barren = 0
            self._changed.notify_all()

    async def leave(self, ordinal: int, outcome: Outcome) -> None:
        """Count a group out that will not be trained."""
        async with self._changed:
            self._close(ordinal)
            self.outcomes[outcome] += 1
            self._barren += 1
            self._changed.notify_all()

    async def take(self, num_groups: int) -> tuple[Group, ...]:
        """Wait for `num_groups` groups and hand them to the trainer, in order of completion.

        Raises NothingToLearn when too many groups in a row were dropped or failed.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: len(self._waiting) >= num_groups or self._barren >= self._max_barren_groups
            )
            if len(self._waiting) < num_groups:
                raise NothingToLearn(
                    f"{self._barren} prompt groups in a row gave nothing to train on "
                    f"({dict(self.outcomes)} so far): the problems are all too easy or all too "
                    "hard for this model, or the verifiers fail"
                )
            self.outcomes[Outcome.TAKEN] += num_groups
            taken = tuple(self._waiting.popleft() for _ in range(num_groups))
            self._changed.notify_all()
            return taken

    def _has_room(self) -> bool:
        outstanding = (len(self._open) + len(self._waiting)) * self._group_size
        return (
            self._in_flight + self._group_size <= self._n_async
            and outstanding + self._group_size <= self._max_outstanding
        )

    def _close(self, ordinal: int) -> None:
        if ordinal not in self._open:
            raise ValueError(f"group {ordinal} is not open: it already left the queue")
        self._open.remove(ordinal)
