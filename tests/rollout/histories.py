"""Random but possible histories of prompt groups, as events."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_magistral.rollout.events import (
    Admitted,
    AnyEvent,
    Began,
    Closed,
    Finished,
    Outcome,
    Rewarded,
    Sampled,
    Taken,
    Trained,
    pack_ids,
    pack_logprobs,
)
from megatron_magistral.types import FinishReason, Problem, Reward, Span
from tests.fakes import problem_of

SIZE = 3
GROUPS_PER_BATCH = 2
PROBLEMS: dict[str, Problem] = {f"p{i}": problem_of(id=f"p{i}") for i in range(5)}


@dataclass
class History:
    """A run that admits, samples, grades, takes and trains in random order."""

    seed: int
    version: int = 0
    step: int = 0
    next_ordinal: int = 0
    admitted: dict[int, int] = field(default_factory=dict)
    """Under which version."""
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    spans: dict[tuple[int, int], list[Span]] = field(default_factory=dict)
    finished: list[tuple[int, int]] = field(default_factory=list)
    graded: dict[int, int] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    is_training: bool = False

    def events(self, count: int) -> Iterator[AnyEvent]:
        self._rng = random.Random(self.seed)
        yield Began(0)
        produced = 1
        while produced < count:
            for event in self._move():
                produced += 1
                yield event

    def _move(self) -> Iterator[AnyEvent]:
        moves = [self._sample] * 6 if self.lengths else []
        moves += [self._finish] * 2 if self.lengths else []
        moves += [self._grade] * 3 if self.finished else []
        moves += [self._admit] if len(self.lengths) < 12 else []
        moves += [self._train] if self.is_training else []
        if not self.is_training and len(self.waiting) >= GROUPS_PER_BATCH:
            moves.append(self._take)
        yield from self._rng.choice(moves)()

    def _admit(self) -> Iterator[AnyEvent]:
        ordinal = self.next_ordinal
        self.next_ordinal += 1
        for member in range(SIZE):
            self.lengths[ordinal, member], self.spans[ordinal, member] = 0, []
        self.admitted[ordinal] = self.version
        due = self.version + 9
        yield Admitted(ordinal, f"p{ordinal % 5}", SIZE, self.version, due, (1, ordinal))

    def _sample(self) -> Iterator[AnyEvent]:
        ordinal, member = key = self._rng.choice(sorted(self.lengths))
        start, count = self.lengths[key], self._rng.randrange(1, 4)
        self.lengths[key] += count
        spans = self.spans[key]
        goes_on = spans and spans[-1].version == self.version
        first = spans.pop().start if goes_on else start
        spans.append(Span(self.version, first, start + count))
        ids = [token_of(key, start + i) for i in range(count)]
        logprobs = [-0.5 * (start + i + 1) for i in range(count)]
        yield Sampled(ordinal, member, start, pack_ids(ids), pack_logprobs(logprobs), self.version)

    def _finish(self) -> Iterator[AnyEvent]:
        ordinal, member = key = self._rng.choice(sorted(self.lengths))
        del self.lengths[key]
        self.finished.append(key)
        yield Finished(ordinal, member, tuple(self.spans.pop(key)), FinishReason.STOP, "text")

    def _grade(self) -> Iterator[AnyEvent]:
        index = self._rng.randrange(len(self.finished))
        ordinal, member = self.finished.pop(index)
        yield Rewarded(ordinal, member, Reward(0.1, float(member), 0.0, 0.0))
        self.graded[ordinal] = self.graded.get(ordinal, 0) + 1
        if self.graded[ordinal] == SIZE:
            outcome = self._rng.choice([Outcome.TAKEN] * 4 + [Outcome.DROPPED, Outcome.FAILED])
            if outcome is Outcome.TAKEN:
                self.waiting.append(ordinal)
            versions = (self.admitted[ordinal], self.version)
            yield Closed(ordinal, outcome, outcome.value, 5, versions)

    def _take(self) -> Iterator[AnyEvent]:
        batch = sorted(self.waiting)[:GROUPS_PER_BATCH]
        self.waiting = [ordinal for ordinal in self.waiting if ordinal not in batch]
        self.is_training = True
        yield Taken(self.step, tuple(batch))

    def _train(self) -> Iterator[AnyEvent]:
        self.is_training = False
        yield Trained(self.step)
        self.step += 1
        self.version = self.step


def token_of(key: tuple[int, int], position: int) -> int:
    return 1000 * key[0] + 100 * key[1] + position
