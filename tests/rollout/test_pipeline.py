"""The pipeline with fake engines and verifiers that finish in random order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from megatron_magistral.rollout.completion import NewTokens
from megatron_magistral.rollout.events import (
    Admitted,
    AnyEvent,
    Closed,
    Finished,
    Rewarded,
    Sampled,
)
from megatron_magistral.rollout.ledger import Ledger, Member, OpenGroup
from megatron_magistral.rollout.pipeline import Pipeline
from megatron_magistral.rollout.queue import (
    Admission,
    GroupQueue,
    NothingToLearn,
    Outcome,
    QueueLimits,
)
from megatron_magistral.rollout.source import PromptSource
from megatron_magistral.types import Completion, FinishReason, GradeStatus, Reward, Span
from tests.fakes import completion_of, problem_of

SIZE = 4
PROBLEMS = [problem_of(id=f"p{i}") for i in range(11)]
BY_ID = {problem.id: problem for problem in PROBLEMS}
PROMPT = (1, 2)


class RandomRollouts:
    """Samples take random turns, a token each; rewards are drawn from `choices`."""

    def __init__(self, choices=(0.0, 1.0), fault_rate=0.0, seed=0):
        self.random = random.Random(seed)
        self.choices = choices
        self.fault_rate = fault_rate
        self.in_flight = 0
        self.groups_of = Counter()
        self.peak_in_flight = 0
        self.partials = []

    async def sample(self, prompt_ids, *, ordinal, partial=None, on_tokens):
        self.partials.append(partial)
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        ids = list(partial.output_ids) if partial else []
        for _ in range(self.random.randrange(1, 9)):
            on_tokens(NewTokens(len(ids), (3,), (-0.5,), 0))
            ids.append(3)
            await asyncio.sleep(0)
        self.in_flight -= 1
        return Completion(
            prompt_ids=tuple(prompt_ids),
            output_ids=tuple(ids),
            logprobs=(-0.5,) * len(ids),
            spans=(Span(0, 0, len(ids)),),
            finish_reason=FinishReason.STOP,
            text="3" * len(ids),
        )

    async def grade(self, problem, completion, group):
        self.groups_of[problem.id, group] += 1
        await asyncio.sleep(0)
        if self.random.random() < self.fault_rate:
            return Reward(0, 0, 0, 0, status=GradeStatus.INFRASTRUCTURE, detail="disk full")
        return Reward(0, self.random.choice(self.choices), 0, 0)


def queue_of(**changes) -> GroupQueue:
    values = {"n_async": 12, "capacity": 8, "group_size": SIZE, "groups_per_batch": 2}
    return GroupQueue(QueueLimits(max_barren_groups=500, **(values | changes)))


def pipeline_of(rollouts, queue, record=lambda event: None) -> Pipeline:
    return Pipeline(
        PromptSource(PROBLEMS, seed=0),
        lambda problem: PROMPT,
        rollouts.sample,
        rollouts.grade,
        queue,
        record,
        group_size=SIZE,
    )


def run_pipeline(rollouts, *, num_batches, record=lambda event: None):
    """The taken groups, the pipeline and its queue, after `num_batches` batches."""

    async def scenario():
        queue = queue_of()
        await queue.weights_changed(0)
        pipeline = pipeline_of(rollouts, queue, record)
        task = asyncio.create_task(pipeline.run())
        taken = []
        for _ in range(num_batches):
            taken += await asyncio.wait_for(queue.take(), 20)
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
    class Broken(RandomRollouts):
        async def sample(self, prompt_ids, *, ordinal, partial=None, on_tokens):
            raise ConnectionError("engine gone")

    async def scenario():
        queue = queue_of()
        await queue.weights_changed(0)
        await asyncio.wait_for(pipeline_of(Broken(), queue).run(), 10)

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(scenario())
    assert caught.group_contains(ConnectionError, match="engine gone")


def test_statistics_count_every_completion_once():
    taken, pipeline, queue = run_pipeline(RandomRollouts(), num_batches=10)
    first, second = pipeline.stats.drain(), pipeline.stats.drain()
    assert first["groups_dropped"] == queue.outcomes[Outcome.DROPPED]
    assert first["groups_taken"] >= len(taken)
    assert "groups_taken" not in second


# --- sources that mean harm --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        (RandomRollouts(choices=(1.0,)), r"\(500 dropped so far; the last one dropped: every rew"),
        (RandomRollouts(fault_rate=1.0), r"\(500 failed so far; the last one failed: disk full\)"),
    ],
)
def test_a_source_without_anything_to_learn_ends_the_run_with_the_reason(rollouts, message):
    with pytest.raises(NothingToLearn, match=message):
        run_pipeline(rollouts, num_batches=1)


@pytest.mark.parametrize("max_staleness", [None, 3])
def test_a_completion_that_is_a_hundred_times_longer_is_trained_and_holds_nobody_up_for_good(
    max_staleness,
):
    class OneIsLong(RandomRollouts):
        async def sample(self, prompt_ids, *, ordinal, partial=None, on_tokens):
            if len(self.partials) == 0:
                self.partials.append(None)
                for _ in range(150):
                    await asyncio.sleep(0)
            return await super().sample(
                prompt_ids, ordinal=ordinal, partial=partial, on_tokens=on_tokens
            )

    async def scenario():
        queue = queue_of(max_staleness=max_staleness)
        await queue.weights_changed(0)
        pipeline = pipeline_of(OneIsLong(choices=range(1000)), queue)
        task = asyncio.create_task(pipeline.run())
        steps = {}
        for step in range(60):
            for group in await asyncio.wait_for(queue.take(), 20):
                steps[group.ordinal] = step
            await queue.weights_changed(step + 1)
        task.cancel()
        return steps

    steps = asyncio.run(scenario())
    if max_staleness is None:
        assert steps[0] > 3  # others overtook it
    else:
        assert steps[0] <= max_staleness
    assert len(steps) == 60 * 2


@pytest.mark.parametrize("max_staleness", [None, 3])
def test_a_verifier_that_hangs_delays_its_group_alone(max_staleness):
    """With a bound on staleness others go on until the bound would be broken."""

    class OneHangs(RandomRollouts):
        def __init__(self):
            super().__init__(choices=range(1000))
            self.may_grade = asyncio.Event()

        async def grade(self, problem, completion, group):
            if group == "0":
                await self.may_grade.wait()
            return await super().grade(problem, completion, group)

    async def scenario():
        rollouts, queue = OneHangs(), queue_of(max_staleness=max_staleness)
        await queue.weights_changed(0)
        task = asyncio.create_task(pipeline_of(rollouts, queue).run())
        num_alone = 10 if max_staleness is None else max_staleness
        steps = {}
        for step in range(num_alone + 2):
            if step == num_alone:
                assert 0 not in steps
                rollouts.may_grade.set()
            for group in await asyncio.wait_for(queue.take(), 20):
                steps[group.ordinal] = step
            await queue.weights_changed(step + 1)
        task.cancel()
        return steps[0] - num_alone

    assert asyncio.run(scenario()) in (0, 1)


# --- what is recorded --------------------------------------------------------------------------


def test_the_record_of_a_group_tells_everything_about_it():
    events: list[AnyEvent] = []
    taken, _, _ = run_pipeline(RandomRollouts(), num_batches=10, record=events.append)
    ledger = Ledger()
    for event in events:
        ledger.apply(event)
    waiting = {group.ordinal: group for group, _ in ledger.restore(0, BY_ID).waiting}
    for group in taken:
        assert waiting[group.ordinal] == group


def test_groups_that_will_not_be_trained_are_recorded_with_the_reason():
    events: list[AnyEvent] = []
    run_pipeline(RandomRollouts(fault_rate=0.7), num_batches=10, record=events.append)
    closed = [event for event in events if isinstance(event, Closed)]
    reasons = {event.outcome: event.reason for event in closed}
    assert reasons[Outcome.FAILED] == "disk full"
    assert reasons[Outcome.DROPPED] in {"every reward is 0", "every reward is 1"}
    assert reasons[Outcome.TAKEN] == ""


# --- going on with what was begun --------------------------------------------------------------


def test_a_group_goes_on_from_where_each_of_its_members_was():
    partial = completion_of(2)
    partial = Completion(PROMPT, (8, 9), (-1.0, -1.0), (Span(0, 0, 2),), FinishReason.ABORT, "")
    sampled = completion_of(3)
    group = OpenGroup(
        ordinal=5,
        problem=PROBLEMS[0],
        version=0,
        due=None,
        prompt_ids=PROMPT,
        members=(
            Member(),
            Member(partial),
            Member(sampled),
            Member(sampled, Reward(0, 0.25, 0, 0)),
        ),
    )
    rollouts, events = RandomRollouts(choices=(0.5, 1.0)), []

    async def scenario():
        queue = queue_of(n_async=SIZE, groups_per_batch=1)
        queue.restore(0, 6, unfinished=[(Admission(5, 0, None), group.num_unfinished)])
        await queue.weights_changed(0)
        task = asyncio.create_task(pipeline_of(rollouts, queue, events.append).run([group]))
        (taken,) = await asyncio.wait_for(queue.take(), 20)
        task.cancel()
        return taken

    taken = asyncio.run(scenario())
    own = [event for event in events if getattr(event, "ordinal", None) == 5]
    assert rollouts.partials[:2] == [None, partial]
    assert taken.ordinal == 5
    assert taken.members[1].completion.output_ids[:2] == (8, 9)
    assert [member.completion for member in taken.members[2:]] == [sampled, sampled]
    assert taken.members[3].reward.correctness == 0.25
    assert not any(isinstance(event, Admitted) for event in own)
    assert sorted(e.member for e in own if isinstance(e, Finished)) == [0, 1]
    assert sorted(e.member for e in own if isinstance(e, Rewarded)) == [0, 1, 2]
    assert min(e.start for e in own if isinstance(e, Sampled) and e.member == 1) == 2


def test_a_group_that_starts_again_is_asked_its_problem_again():
    """Its prompt may have been compacted away."""
    group = OpenGroup(5, PROBLEMS[0], 0, None, (), (Member(),) * SIZE)

    async def scenario():
        queue = queue_of(n_async=SIZE, groups_per_batch=1)
        queue.restore(0, 6, unfinished=[(Admission(5, 0, None), SIZE)])
        await queue.weights_changed(0)
        rollouts = RandomRollouts(choices=range(1000))
        task = asyncio.create_task(pipeline_of(rollouts, queue).run([group]))
        (taken,) = await asyncio.wait_for(queue.take(), 20)
        task.cancel()
        return taken

    taken = asyncio.run(scenario())
    assert [member.completion.prompt_ids for member in taken.members] == [PROMPT] * SIZE
