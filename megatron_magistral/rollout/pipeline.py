"""The rollout side of Figure 3 of the paper, as one loop:

    source -> generators -> verifiers -> groups -> bounded queue -> trainer ranks

Generators never wait for trainers: admission keeps n_async sequences in flight until the queue is
full, and nothing that was started is stopped or discarded. Whatever happens to a group is recorded
before anything else is done with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from megatron_magistral.algorithm.advantage import Diversity, diversity
from megatron_magistral.rollout.completion import NewTokens
from megatron_magistral.rollout.events import (
    Admitted,
    AnyEvent,
    Closed,
    Finished,
    Outcome,
    Rewarded,
    Sampled,
    pack_ids,
    pack_logprobs,
    version_range,
)
from megatron_magistral.rollout.ledger import Member, OpenGroup
from megatron_magistral.rollout.queue import GroupQueue
from megatron_magistral.rollout.stats import RolloutStats
from megatron_magistral.types import Completion, Graded, GradeStatus, Group, Problem, Reward

# Modification 5 of section 2.1: a group whose rewards are all equal teaches nothing.
OUTCOMES = {
    Diversity.DIVERSE: Outcome.TAKEN,
    Diversity.UNIFORM: Outcome.DROPPED,
    Diversity.UNGRADED: Outcome.FAILED,
}

Encode = Callable[[Problem], tuple[int, ...]]
"""The prompt of a problem, in tokens."""
Record = Callable[[AnyEvent], None]


class Sampler(Protocol):
    """Samples one completion of a problem from the current policy."""

    async def __call__(self, problem: Problem) -> Completion: ...


class MemberSampler(Protocol):
    """Samples what `partial` lacks of a completion; tells of tokens as they arrive."""

    async def __call__(
        self,
        prompt_ids: Sequence[int],
        *,
        ordinal: int,
        partial: Completion | None,
        on_tokens: Callable[[NewTokens], None],
    ) -> Completion: ...


class Grader(Protocol):
    """Grades one completion; the same `group` draws the same tests."""

    async def __call__(self, problem: Problem, completion: Completion, group: str) -> Reward: ...


class Source(Protocol):
    def problem(self, ordinal: int) -> Problem:
        """Of the `ordinal`-th admitted group."""


def ignore_group(group: Group, outcome: Outcome) -> None:
    """For a pipeline whose owner need not know of each group."""


class Pipeline:
    """`on_closed` is told of every group that is whole, whatever becomes of it."""

    def __init__(
        self,
        source: Source,
        encode: Encode,
        sample: MemberSampler,
        grade: Grader,
        queue: GroupQueue,
        record: Record,
        *,
        group_size: int,
        on_closed: Callable[[Group, Outcome], None] = ignore_group,
    ) -> None:
        self._source = source
        self._on_closed = on_closed
        self._encode = encode
        self._sample = sample
        self._grade = grade
        self._queue = queue
        self._record = record
        self._group_size = group_size
        self.stats = RolloutStats()

    async def run(self, unfinished: Sequence[OpenGroup] = ()) -> None:
        """Finish groups that another process began, then admit and roll out new ones, until
        cancelled. A failing group fails the pipeline."""
        async with asyncio.TaskGroup() as groups:
            for group in unfinished:
                groups.create_task(self._roll_out(group))
            while True:
                groups.create_task(self._roll_out(await self._admit()))

    async def _admit(self) -> OpenGroup:
        admission = await self._queue.admit()
        problem = self._source.problem(admission.ordinal)
        group = OpenGroup(
            ordinal=admission.ordinal,
            problem=problem,
            version=admission.version,
            due=admission.due,
            prompt_ids=self._encode(problem),
            members=(Member(),) * self._group_size,
        )
        self._record(
            Admitted(
                group.ordinal,
                problem.id,
                self._group_size,
                group.version,
                group.due,
                group.prompt_ids,
            )
        )
        return group

    async def _roll_out(self, group: OpenGroup) -> None:
        group = replace(group, prompt_ids=group.prompt_ids or self._encode(group.problem))
        async with asyncio.TaskGroup() as tasks:
            rollouts = [
                tasks.create_task(self._sample_and_grade(group, index))
                for index in range(len(group.members))
            ]
        members = [rollout.result() for rollout in rollouts]
        outcome = OUTCOMES[diversity(members)]
        record = closed(group.ordinal, outcome, members)
        self._record(record)
        self.stats.add(members, outcome)
        whole = Group(group.ordinal, group.problem, tuple(members))
        self._on_closed(whole, outcome)
        if outcome is Outcome.TAKEN:
            await self._queue.put(whole)
        else:
            await self._queue.leave(group.ordinal, outcome, record.reason)

    async def _sample_and_grade(self, group: OpenGroup, index: int) -> Graded:
        completion, reward = group.members[index].completion, group.members[index].reward
        if completion is None or not group.members[index].is_sampled:
            completion = await self._finish(group, index, completion)
        if reward is None:
            begin = time.monotonic()
            reward = await self._grade(group.problem, completion, group=str(group.ordinal))
            self.stats.grading.add(time.monotonic() - begin)
            self._record(Rewarded(group.ordinal, index, reward))
        return Graded(completion, reward)

    async def _finish(self, group: OpenGroup, index: int, partial: Completion | None) -> Completion:
        def on_tokens(new: NewTokens) -> None:
            ids, logprobs = pack_ids(new.ids), pack_logprobs(new.logprobs)
            self._record(Sampled(group.ordinal, index, new.start, ids, logprobs, new.version))

        done = await self._sample(
            group.prompt_ids, ordinal=group.ordinal, partial=partial, on_tokens=on_tokens
        )
        self._record(Finished(group.ordinal, index, done.spans, done.finish_reason, done.text))
        await self._queue.sequence_done()
        return done


def closed(ordinal: int, outcome: Outcome, members: Sequence[Graded]) -> Closed:
    """What is kept of a group for good."""
    reason = ""
    if outcome is Outcome.FAILED:
        reason = members[0].reward.detail
    elif outcome is Outcome.DROPPED:
        reward = next(m.reward for m in members if m.reward.status is GradeStatus.GRADED)
        reason = f"every reward is {reward.total:g}"
    completions = [member.completion for member in members]
    num_tokens = sum(len(completion.output_ids) for completion in completions)
    return Closed(ordinal, outcome, reason, num_tokens, version_range(completions))
