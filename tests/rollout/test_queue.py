"""The invariants of the bounded queue, one by one (see also test_queue_properties.py)."""

from __future__ import annotations

import asyncio

import pytest

from megatron_magistral.rollout.queue import (
    Admission,
    GroupQueue,
    NothingToLearn,
    Outcome,
    QueueLimits,
)
from tests.fakes import group_of

SIZE = 4


def limits_of(**changes: int | None) -> QueueLimits:
    values: dict = {
        "n_async": 8,
        "capacity": 8,
        "group_size": SIZE,
        "groups_per_batch": 1,
        "max_barren_groups": 5,
    }
    return QueueLimits(**(values | changes))


async def queue_of(**changes: int | None) -> GroupQueue:
    """An empty queue whose generators hold version 0."""
    queue = GroupQueue(limits_of(**changes))
    await queue.weights_changed(0)
    return queue


async def would_wait(awaitable) -> bool:
    task = asyncio.ensure_future(awaitable)
    for _ in range(6):
        await asyncio.sleep(0)
    waits = not task.done()
    task.cancel()
    return waits


async def finish_sequences(queue: GroupQueue, count: int) -> None:
    for _ in range(count):
        await queue.sequence_done()


async def admit_and_finish(queue: GroupQueue, count: int) -> list[int]:
    """So many groups, admitted and sampled, not graded."""
    ordinals = []
    for _ in range(count):
        ordinals.append((await queue.admit()).ordinal)
        await finish_sequences(queue, SIZE)
    return ordinals


def test_no_more_than_n_async_sequences_are_in_flight():
    async def scenario():
        queue = await queue_of(n_async=8, capacity=1000)
        await queue.admit()
        await queue.admit()
        assert queue.num_in_flight == 8
        assert await would_wait(queue.admit())
        await finish_sequences(queue, SIZE)
        assert not await would_wait(queue.admit())

    asyncio.run(scenario())


def test_generators_are_held_back_when_trainers_lag():
    async def scenario():
        queue = await queue_of(n_async=4, capacity=8)
        for ordinal in await admit_and_finish(queue, 3):
            await queue.put(group_of(ordinal, size=SIZE))
        assert queue.num_waiting == 12
        assert await would_wait(queue.admit())
        await queue.take()
        assert not await would_wait(queue.admit())

    asyncio.run(scenario())


def test_groups_still_being_graded_count_against_the_bound():
    async def scenario():
        queue = await queue_of(n_async=4, capacity=4)
        await admit_and_finish(queue, 2)
        assert queue.num_waiting == 0
        assert await would_wait(queue.admit())

    asyncio.run(scenario())


def test_the_oldest_groups_that_are_ready_are_taken_first():
    async def scenario():
        queue = await queue_of(groups_per_batch=2, n_async=16)
        first, second, third = await admit_and_finish(queue, 3)
        for ordinal in (third, second):
            await queue.put(group_of(ordinal, size=SIZE))
        assert [group.ordinal for group in await queue.take()] == [second, third]
        await queue.put(group_of(first, size=SIZE))

    asyncio.run(scenario())


def test_taking_waits_for_enough_groups():
    async def scenario():
        queue = await queue_of(groups_per_batch=2)
        (ordinal,) = await admit_and_finish(queue, 1)
        await queue.put(group_of(ordinal, size=SIZE))
        assert await would_wait(queue.take())

    asyncio.run(scenario())


def test_groups_that_are_late_already_are_trained_first_and_newer_ones_are_still_admitted():
    """As after a resume under a narrower bound."""

    async def scenario():
        queue = GroupQueue(limits_of(groups_per_batch=2, n_async=16, max_staleness=1))
        waiting = [(group_of(ordinal, size=SIZE), ordinal - 3) for ordinal in range(3)]
        queue.restore(2, 3, waiting=waiting)
        await queue.weights_changed(2)
        trained = []
        for step in range(2, 6):
            while not await would_wait(queue.admit()):  # cancelled or not, it was admitted
                ordinal = queue.next_ordinal - 1
                await finish_sequences(queue, SIZE)
                await queue.put(group_of(ordinal, size=SIZE))
            trained += [group.ordinal for group in await queue.take()]
            await queue.weights_changed(step + 1)
        assert trained == sorted(trained)
        assert trained[:3] == [0, 1, 2]

    asyncio.run(scenario())


@pytest.mark.parametrize("leave", [Outcome.DROPPED, Outcome.FAILED])
def test_a_group_leaves_exactly_once(leave):
    async def scenario():
        queue = await queue_of()
        ordinal = (await queue.admit()).ordinal
        await queue.leave(ordinal, leave)
        with pytest.raises(ValueError, match="already left"):
            await queue.put(group_of(ordinal, size=SIZE))
        assert queue.outcomes == {leave: 1}

    asyncio.run(scenario())


def test_a_dropped_group_makes_room_for_another():
    async def scenario():
        queue = await queue_of(n_async=4, capacity=4)
        ordinals = await admit_and_finish(queue, 2)
        await queue.leave(ordinals[0], Outcome.DROPPED)
        assert not await would_wait(queue.admit())

    asyncio.run(scenario())


def test_only_barren_groups_end_the_wait_with_a_reason():
    async def scenario():
        queue = await queue_of(max_barren_groups=3, n_async=SIZE)
        for _ in range(3):
            (ordinal,) = await admit_and_finish(queue, 1)
            await queue.leave(ordinal, Outcome.DROPPED, "every reward is 0")
        with pytest.raises(
            NothingToLearn,
            match=r"3 prompt groups in a row .*\(3 dropped so far; the last one dropped: every",
        ):
            await queue.take()

    asyncio.run(scenario())


def test_a_trainable_group_resets_the_count_of_barren_ones():
    async def scenario():
        queue = await queue_of(max_barren_groups=2, n_async=SIZE)
        for outcome in (Outcome.DROPPED, Outcome.TAKEN, Outcome.DROPPED):
            (ordinal,) = await admit_and_finish(queue, 1)
            if outcome is Outcome.TAKEN:
                await queue.put(group_of(ordinal, size=SIZE))
            else:
                await queue.leave(ordinal, outcome)
        assert len(await queue.take()) == 1

    asyncio.run(scenario())


# --- the bound on staleness --------------------------------------------------------------------


def test_a_batch_waits_for_a_straggler_that_would_be_too_old_in_the_next():
    async def scenario():
        queue = await queue_of(max_staleness=1, n_async=16)
        straggler, second = await admit_and_finish(queue, 2)
        await queue.put(group_of(second, size=SIZE))
        await queue.take()  # step 0; the straggler can still be trained in step 1
        await queue.weights_changed(1)
        (third,) = await admit_and_finish(queue, 1)
        await queue.put(group_of(third, size=SIZE))
        assert await would_wait(queue.take())
        await queue.put(group_of(straggler, size=SIZE))
        assert [group.ordinal for group in await queue.take()] == [straggler]

    asyncio.run(scenario())


def test_nothing_is_admitted_that_could_become_too_old():
    async def scenario():
        queue = await queue_of(max_staleness=1, n_async=64, capacity=64)
        assert [(await queue.admit()).due for _ in range(2)] == [1, 1]
        assert await would_wait(queue.admit())  # it could have to wait until step 2

    asyncio.run(scenario())


def test_a_bound_of_zero_takes_turns_with_the_trainer():
    async def scenario():
        queue = await queue_of(max_staleness=0, n_async=64, capacity=64)
        (ordinal,) = await admit_and_finish(queue, 1)
        await queue.put(group_of(ordinal, size=SIZE))
        await queue.take()
        assert await would_wait(queue.admit())
        await queue.weights_changed(1)
        assert (await queue.admit()).version == 1

    asyncio.run(scenario())


def test_what_the_next_batch_waits_for_is_said():
    async def scenario():
        queue = await queue_of(max_staleness=1, groups_per_batch=2, n_async=16)
        _, second = await admit_and_finish(queue, 2)
        await queue.put(group_of(second, size=SIZE))
        return queue.describe()

    assert asyncio.run(scenario()) == (
        "step 0: 1 of 2 groups are ready, 1 are with generators and verifiers, "
        "first of them group 0, due 1"
    )


def test_new_limits_hold_from_the_next_admission_and_the_next_batch_on():
    async def scenario():
        queue = await queue_of(groups_per_batch=2, n_async=8, max_staleness=1)
        for ordinal in await admit_and_finish(queue, 4):
            await queue.put(group_of(ordinal, size=SIZE))
        assert len(await queue.take()) == 2
        smaller = limits_of(groups_per_batch=1, n_async=4, capacity=4, max_staleness=1)
        await queue.set_limits(smaller)
        # Two are left, both due in step 1, of which the second cannot be trained by then any more.
        assert [len(await queue.take()) for _ in range(2)] == [1, 1]
        await queue.weights_changed(3)
        await queue.admit()
        assert await would_wait(queue.admit())

    asyncio.run(scenario())


# --- going on where another process left off ---------------------------------------------------


def test_batches_are_repeated_before_new_ones_and_admission_goes_on_after_the_last_group():
    async def scenario():
        queue = GroupQueue(limits_of(n_async=16, max_staleness=4))
        repeated = (group_of(7, size=SIZE),)
        queue.restore(
            5,
            17,
            repeated=[lambda: repeated],
            waiting=[(group_of(9, size=SIZE), 8)],
            unfinished=[(Admission(11, 5, 9), 3)],
        )
        await queue.weights_changed(6)
        assert queue.num_in_flight == 3
        assert await queue.take() == repeated
        assert [group.ordinal for group in await queue.take()] == [9]
        assert await queue.admit() == Admission(17, 6, 10)

    asyncio.run(scenario())


def test_a_group_that_is_late_already_stops_nobody():
    """As after a resume with a lower bound: its batch may need others to be full."""

    async def scenario():
        queue = GroupQueue(limits_of(n_async=16, groups_per_batch=2, max_staleness=1))
        queue.restore(5, 10, waiting=[(group_of(9, size=SIZE), 3)])
        await queue.weights_changed(5)
        (ordinal,) = await admit_and_finish(queue, 1)
        await queue.put(group_of(ordinal, size=SIZE))
        return [group.ordinal for group in await asyncio.wait_for(queue.take(), 10)]

    assert asyncio.run(scenario()) == [9, 10]


def test_new_limits_hold_before_anyone_else_runs():
    async def scenario():
        queue = await queue_of(n_async=8)
        async with queue._changed:  # as one that is just being woken up has it
            setting = asyncio.ensure_future(queue.set_limits(limits_of(n_async=SIZE)))
            await asyncio.sleep(0)
            assert not setting.done()
        await queue.admit()
        assert await would_wait(queue.admit())
        await setting

    asyncio.run(scenario())
