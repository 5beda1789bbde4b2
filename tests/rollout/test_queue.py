"""The invariants of rollout/queue.py, under their own names."""

import asyncio

import pytest

from megatron_magistral.rollout.queue import GroupQueue, NothingToLearn, Outcome
from tests.fakes import group_of

SIZE = 4


def queue_of(**changes: int) -> GroupQueue:
    settings = {"n_async": 8, "capacity": 8, "group_size": SIZE, "max_barren_groups": 5} | changes
    return GroupQueue(**settings)


async def would_wait(awaitable) -> bool:
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    waits = not task.done()
    task.cancel()
    return waits


async def finish_sequences(queue: GroupQueue, count: int) -> None:
    for _ in range(count):
        await queue.sequence_done()


def test_no_more_than_n_async_sequences_are_in_flight():
    async def scenario():
        queue = queue_of(n_async=8, capacity=1000)
        await queue.admit()
        await queue.admit()
        assert queue.num_in_flight == 8
        assert await would_wait(queue.admit())
        await finish_sequences(queue, SIZE)
        assert not await would_wait(queue.admit())

    asyncio.run(scenario())


def test_generators_are_held_back_when_trainers_lag():
    async def scenario():
        queue = queue_of(n_async=4, capacity=8)
        for _ in range(3):
            ordinal = await queue.admit()
            await finish_sequences(queue, SIZE)
            await queue.put(group_of(ordinal, size=SIZE))
        assert queue.num_waiting == 12
        assert await would_wait(queue.admit())
        await queue.take(1)
        assert not await would_wait(queue.admit())

    asyncio.run(scenario())


def test_groups_still_being_graded_count_against_the_bound():
    async def scenario():
        queue = queue_of(n_async=4, capacity=4)
        for _ in range(2):
            await queue.admit()
            await finish_sequences(queue, SIZE)
        assert queue.num_waiting == 0
        assert await would_wait(queue.admit())

    asyncio.run(scenario())


def test_groups_are_taken_in_order_of_completion():
    async def scenario():
        queue = queue_of()
        first, second = await queue.admit(), await queue.admit()
        await queue.put(group_of(second, size=SIZE))
        await queue.put(group_of(first, size=SIZE))
        assert [g.ordinal for g in await queue.take(2)] == [second, first]

    asyncio.run(scenario())


def test_taking_waits_for_enough_groups():
    async def scenario():
        queue = queue_of()
        await queue.put(group_of(await queue.admit(), size=SIZE))
        assert await would_wait(queue.take(2))

    asyncio.run(scenario())


@pytest.mark.parametrize("leave", [Outcome.DROPPED, Outcome.FAILED])
def test_a_group_leaves_exactly_once(leave):
    async def scenario():
        queue = queue_of()
        ordinal = await queue.admit()
        await queue.leave(ordinal, leave)
        with pytest.raises(ValueError, match="already left"):
            await queue.put(group_of(ordinal, size=SIZE))
        assert queue.outcomes == {leave: 1}

    asyncio.run(scenario())


def test_a_dropped_group_makes_room_for_another():
    async def scenario():
        queue = queue_of(n_async=4, capacity=4)
        ordinals = []
        for _ in range(2):
            ordinals.append(await queue.admit())
            await finish_sequences(queue, SIZE)
        await queue.leave(ordinals[0], Outcome.DROPPED)
        assert not await would_wait(queue.admit())

    asyncio.run(scenario())


def test_only_barren_groups_end_the_wait_with_a_reason():
    async def scenario():
        queue = queue_of(max_barren_groups=3, n_async=SIZE)
        for _ in range(3):
            ordinal = await queue.admit()
            await finish_sequences(queue, SIZE)
            await queue.leave(ordinal, Outcome.DROPPED)
        with pytest.raises(NothingToLearn, match=r"3 prompt groups in a row.*'dropped'"):
            await queue.take(1)

    asyncio.run(scenario())


def test_a_trainable_group_resets_the_count_of_barren_ones():
    async def scenario():
        queue = queue_of(max_barren_groups=2, n_async=SIZE)
        for outcome in (Outcome.DROPPED, Outcome.TAKEN, Outcome.DROPPED):
            ordinal = await queue.admit()
            await finish_sequences(queue, SIZE)
            if outcome is Outcome.TAKEN:
                await queue.put(group_of(ordinal, size=SIZE))
            else:
                await queue.leave(ordinal, outcome)
        assert len(await queue.take(1)) == 1

    asyncio.run(scenario())


def test_admission_goes_on_after_the_groups_that_were_trained():
    async def scenario():
        queue = queue_of()
        queue.start_at(17)
        return [await queue.admit(), await queue.admit()]

    assert asyncio.run(scenario()) == [17, 18]
