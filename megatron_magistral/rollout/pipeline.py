"""The rollout side of Figure 3 of the paper, as one loop:

    source -> generators -> verifiers -> groups -> bounded queue -> trainer ranks

Generators never wait for trainers: admission keeps n_async sequences in flight until the queue is
full, and nothing that was started is stopped or discarded.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from megatron_magistral.algorithm.advantage import Diversity, diversity
from megatron_magistral.rollout.queue import GroupQueue, Outcome
from megatron_magistral.rollout.source import PromptSource
from megatron_magistral.rollout.stats import RolloutStats
from megatron_magistral.types import Completion, Graded, Group, Problem, Reward

# Modification 5 of section 2.1: a group whose rewards are all equal teaches nothing.
OUTCOMES = {
    Diversity.DIVERSE: Outcome.TAKEN,
    Diversity.UNIFORM: Outcome.DROPPED,
    Diversity.UNGRADED: Outcome.FAILED,
}


class Sampler(Protocol):
    """Samples one completion of a problem from the current policy."""

    async def __call__(self, problem: Problem) -> Completion: ...


class Grader(Protocol):
    """Grades one completion; the same `group` draws the same tests."""

    async def __call__(self, problem: Problem, completion: Completion, group: str) -> Reward: ...


class Pipeline:
    def __init__(
        self,
        source: PromptSource,
        sample: Sampler,
        grade: Grader,
        queue: GroupQueue,
        *,
        group_size: int,
    ) -> None:
        self._source = source
        self._sample = sample
        self._grade = grade
        self._queue = queue
        self._group_size = group_size
        self.stats = RolloutStats()

    async def run(self) -> None:
        """Admit and roll out groups until cancelled. A failing group fails the pipeline."""
        async with asyncio.TaskGroup() as groups:
            while True:
                ordinal = await self._queue.admit()
                groups.create_task(self._roll_out(ordinal, self._source.problem(ordinal)))

    async def _roll_out(self, ordinal: int, problem: Problem) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._sample_and_grade(ordinal, problem))
                for _ in range(self._group_size)
            ]
        members = [task.result() for task in tasks]
        outcome = OUTCOMES[diversity(members)]
        self.stats.add(members, outcome)
        if outcome is Outcome.TAKEN:
            await self._queue.put(Group(ordinal, problem, tuple(members)))
        else:
            await self._queue.leave(ordinal, outcome)

    async def _sample_and_grade(self, ordinal: int, problem: Problem) -> Graded:
        try:
            completion = await self._sample(problem)
        finally:
            await self._queue.sequence_done()
        return Graded(completion, await self._grade(problem, completion, group=str(ordinal)))
