"""The pipeline with fake engines and verifiers that finish in random order."""

import asyncio
import random
from collections import Counter

import pytest

from megatron_magistral.rollout.pipeline import Pipeline
from megatron_magistral.rollout.queue import GroupQueue, Outcome
from megatron_magistral.rollout.source import PromptSource
from megatron_magistral.types import GradeStatus, Reward
from tests.fakes import completion_of, problem_of

SIZE = 4
PROBLEMS = [problem_of(id=f"p{i}") for i in range(11)]


class RandomRollouts:
    """Samples take random turns; rewards are drawn from `choices`."""

    def __init__(self, choices=(0.0, 1.0), fault_rate=0.0, seed=0):
        self.random = random.Random(seed)
        self.choices = choices
        self.fault_rate = fault_rate
        self.in_flight = 0
        self.groups_of = Counter()
        self.peak_in_flight = 0

    async def sample(self, problem):
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        for _ in range(self.random.randrange(8)):
            await asyncio.sleep(0)
        self.in_flight -= 1
        return completion_of(self.random.randrange(1, 9))

    async def grade(self, problem, completion, group):
        self.groups_of[problem.id, group] += 1
        await asyncio.sleep(0)
        if self.random.random() < self.fault_rate:
            return Reward(0, 0, 0, 0, status=GradeStatus.INFRASTRUCTURE)
        return Reward(0, self.random.choice(self.choices), 0, 0)


def run_pipeline(rollouts, *, num_batches, groups_per_batch=2):
    """The taken groups, the pipeline and its queue, after `num_batches` batches."""

    async def scenario():
        queue = GroupQueue(n_async=12, capacity=8, group_size=SIZE, max_barren_groups=500)
        pipeline = Pipeline(
            PromptSource(PROBLEMS, seed=0),
            rollouts.sample,
            rollouts.grade,
            queue,
            group_size=SIZE,
        )
        task = asyncio.create_task(pipeline.run())
        taken = []
        for _ in range(num_batches):
            taken += await asyncio.wait_for(queue.take(groups_per_batch), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return taken, pipeline, queue

    return asyncio.run(scenario())


def test_no_group_is_taken_twice_and_none_skipped():
    taken, _, queue = run_pipeline(RandomRollouts(), num_batches=40)
    ordinals = Counter(group.ordinal for group in taken)
    assert set(ordinals.values()) == {1}
    lost = set(range(max(ordinals))) - set(ordinals)
    # What is not taken was dropped, or is still with the generators or in the queue.
    assert len(lost) <= queue.outcomes[Outcome.DROPPED] + (12 + 8) // SIZE


def test_every_taken_group_is_whole_and_diverse():
    taken, _, _ = run_pipeline(RandomRollouts(), num_batches=20)
    for group in taken:
        assert len(group.members) == SIZE
        assert len({member.reward.total for member in group.members}) > 1


def test_all_members_of_a_group_are_graded_under_its_own_name():
    rollouts = RandomRollouts()
    taken, _, _ = run_pipeline(rollouts, num_batches=10)
    for group in taken:
        assert rollouts.groups_of[group.problem.id, str(group.ordinal)] == SIZE


def test_in_flight_sequences_stay_within_n_async():
    rollouts = RandomRollouts()
    run_pipeline(rollouts, num_batches=20)
    assert 8 < rollouts.peak_in_flight <= 12


def test_groups_that_no_verifier_could_grade_are_failed_not_trained():
    taken, _, queue = run_pipeline(RandomRollouts(fault_rate=0.7), num_batches=10)
    assert queue.outcomes[Outcome.FAILED] > 0
    for group in taken:
        graded = [m for m in group.members if m.reward.status is GradeStatus.GRADED]
        assert len(graded) >= 2


def test_a_failing_sampler_fails_the_pipeline_instead_of_hanging_it():
    async def broken(problem):
        raise ConnectionError("engine gone")

    async def scenario():
        queue = GroupQueue(n_async=8, capacity=8, group_size=SIZE, max_barren_groups=5)
        pipeline = Pipeline(
            PromptSource(PROBLEMS, seed=0), broken, RandomRollouts().grade, queue, group_size=SIZE
        )
        await asyncio.wait_for(pipeline.run(), 10)

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(scenario())
    assert caught.group_contains(ConnectionError, match="engine gone")


def test_statistics_count_every_completion_once():
    taken, pipeline, queue = run_pipeline(RandomRollouts(), num_batches=10)
    first, second = pipeline.stats.drain(), pipeline.stats.drain()
    assert first["groups_dropped"] == queue.outcomes[Outcome.DROPPED]
    assert first["groups_taken"] >= len(taken)
    assert "groups_taken" not in second
