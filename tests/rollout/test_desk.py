"""The desk and the trainer's feed against each other, over real HTTP on the loopback interface."""

import asyncio
import errno
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_magistral.algorithm.batch import make_batch
from megatron_magistral.algorithm.settings import AlgorithmSettings
from megatron_magistral.cluster import free_ports
from megatron_magistral.rollout.desk import Desk
from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.trainer.feed import Feed, FeedError, Instead
from megatron_magistral.types import Progress
from tests.fakes import group_of

NUM_RANKS = 2


async def two_group_batch(step):
    groups = [group_of(2 * step), group_of(2 * step + 1)]
    return make_batch(step, groups, AlgorithmSettings(), num_ranks=NUM_RANKS, seed=0)


def with_desk(client, *, next_batch=two_group_batch, num_steps=2):
    """Run the blocking `client(feed, desk, pool)` beside a served desk; returns what it returns."""

    async def scenario():
        pool, trained = EnginePool([]), []
        desk = Desk(pool, next_batch, lambda *row: trained.append(row), num_steps)
        (port,) = free_ports(1)
        async with desk.serve("127.0.0.1", port):
            desk.open()
            feed = Feed(f"http://127.0.0.1:{port}", batch_timeout_s=10)
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(1) as thread:
                try:
                    return await loop.run_in_executor(thread, client, feed, desk, pool), trained
                finally:
                    feed.close()

    return asyncio.run(asyncio.wait_for(scenario(), 30))


def test_shares_of_all_ranks_are_the_batch_and_disjoint():
    def client(feed, desk, pool):
        return [feed.pull(0, rank) for rank in range(NUM_RANKS)]

    shares, _ = with_desk(client)
    whole = asyncio.run(two_group_batch(0)).minibatches[0]
    parts = [share.minibatches[0] for share in shares]
    assert Counter(s for part in parts for s in part.sequences) == Counter(whole.sequences)
    assert [set(part.ranks) for part in parts] == [{0}, {1}]


def test_every_process_of_a_replica_sees_the_same_share():
    def client(feed, desk, pool):
        return feed.pull(0, 1), feed.pull(0, 1)

    (first, second), _ = with_desk(client)
    assert first == second


def test_steps_are_handed_out_in_order_and_acknowledged_once():
    def client(feed, desk, pool):
        feed.pull(0, 0)
        feed.acknowledge(0, {"loss": 0.5})
        with pytest.raises(FeedError, match="409"):
            feed.acknowledge(0, {"loss": 0.5})
        with pytest.raises(FeedError, match="step 0 is trained already"):
            feed.pull(0, 0)
        return feed.pull(1, 0).step

    step, trained = with_desk(client)
    assert step == 1
    assert trained == [(0, {"loss": 0.5})]


def test_a_step_that_was_skipped_is_acknowledged_with_what_is_not_a_number():
    def client(feed, desk, pool):
        feed.pull(0, 0)
        feed.acknowledge(0, {"loss": math.nan, "grad_norm": math.inf, "skipped": 1.0})
        return feed.pull(1, 0).step

    step, ((_, metrics),) = with_desk(client)
    assert step == 1
    assert math.isnan(metrics["loss"]) and not math.isfinite(metrics["grad_norm"])
    assert metrics["skipped"] == 1.0


def test_a_rank_may_ask_for_the_next_step_before_another_acknowledged_this_one():
    def client(feed, desk, pool):
        feed.pull(0, 0)
        with ThreadPoolExecutor(1) as rank_1:
            ahead = rank_1.submit(feed.pull, 1, 1)
            feed.acknowledge(0, {})
            return ahead.result(timeout=10).step

    assert with_desk(client)[0] == 1


def test_a_request_that_its_step_has_overtaken_makes_no_batch_of_the_next():
    """Of trainers that were killed while they waited: it goes on beside those of the new ones."""
    made = []

    async def next_batch(step):
        made.append(step)
        return await two_group_batch(step)

    async def scenario():
        desk = Desk(EnginePool([]), next_batch, lambda *row: None, 2)
        has_arrived, may_go_on = asyncio.Event(), asyncio.Event()
        wait = desk._open_or_stopping

        async def wait_long():
            has_arrived.set()
            await may_go_on.wait()

        (port,) = free_ports(1)
        async with desk.serve("127.0.0.1", port):
            desk.open()
            feed = Feed(f"http://127.0.0.1:{port}", batch_timeout_s=10)
            desk._open_or_stopping = wait_long
            late = asyncio.create_task(asyncio.to_thread(feed.pull, 0, 0))
            await has_arrived.wait()
            desk._open_or_stopping = wait
            await asyncio.to_thread(feed.pull, 0, 0)
            await asyncio.to_thread(feed.acknowledge, 0, {})
            may_go_on.set()
            with pytest.raises(FeedError, match="step 0 is trained already"):
                await late
            await asyncio.to_thread(feed.pull, 1, 0)
            feed.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert made == [0, 1]


def test_requests_wait_while_weights_change():
    def client(feed, desk, pool):
        feed.end_update(3)
        open_before = pool.is_open, pool.version
        feed.begin_update(4)
        closed = pool.is_open
        feed.end_update(4)
        return open_before, closed, (pool.is_open, pool.version)

    (before, during, after), _ = with_desk(client)
    assert before == (True, 3)
    assert during is False
    assert after == (True, 4)


def test_a_batch_that_cannot_be_made_ends_the_run_with_its_reason():
    async def impossible(step):
        raise RuntimeError("nothing to learn")

    async def scenario():
        desk = Desk(EnginePool([]), impossible, lambda *row: None, 1)
        (port,) = free_ports(1)
        async with desk.serve("127.0.0.1", port):
            desk.open()
            feed = Feed(f"http://127.0.0.1:{port}", batch_timeout_s=10)
            pull = asyncio.get_running_loop().run_in_executor(None, feed.pull, 0, 0)
            with pytest.raises(RuntimeError, match="nothing to learn"):
                await asyncio.wait_for(desk.finished(), 10)
            with pytest.raises(FeedError, match="500"):
                await pull
            feed.close()

    asyncio.run(scenario())


def test_a_step_that_cannot_be_recorded_ends_the_run_with_its_reason():
    def full(step, metrics):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def scenario():
        desk = Desk(EnginePool([]), two_group_batch, full, 1)
        (port,) = free_ports(1)
        async with desk.serve("127.0.0.1", port):
            feed = Feed(f"http://127.0.0.1:{port}", batch_timeout_s=10)
            acknowledge = asyncio.get_running_loop().run_in_executor(None, feed.acknowledge, 0, {})
            with pytest.raises(OSError, match="No space left"):
                await asyncio.wait_for(desk.finished(), 10)
            with pytest.raises(FeedError, match="500"):
                await acknowledge
            feed.close()

    asyncio.run(scenario())


def test_a_dead_controller_is_named_in_the_error():
    (port,) = free_ports(1)
    feed = Feed(f"http://127.0.0.1:{port}", batch_timeout_s=1)
    with pytest.raises(FeedError, match=r"controller: GET /steps/0/shares/0.* failed after"):
        feed.pull(0, 0)


# --- where the stage goes on -------------------------------------------------------------------


def with_trainers(client, **options):
    """As `with_desk`, with a controller that lets trainers begin wherever they say."""

    async def scenario():
        pool, starts = EnginePool([]), []
        desk = Desk(pool, two_group_batch, lambda *row: None, 9, **options)

        async def control():
            while True:
                starts.append(await desk.started())
                desk.go_on()
                desk.open()
                await desk.finished()

        (port,) = free_ports(1)
        async with desk.serve("127.0.0.1", port):
            controlling = asyncio.create_task(control())
            feed = Feed(f"http://127.0.0.1:{port}", batch_timeout_s=10)
            try:
                return await asyncio.to_thread(client, feed, desk, pool), starts
            finally:
                controlling.cancel()
                feed.close()

    return asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_stage_goes_on_at_the_step_that_the_trainers_name():
    def client(feed, desk, pool):
        feed.start(Progress(next_step=5))
        with pytest.raises(FeedError, match="step 4 is trained already"):
            feed.pull(4, 0)
        return feed.pull(5, 0).step

    assert with_trainers(client) == (5, [Progress(next_step=5)])


def test_trainers_may_begin_anew_from_an_earlier_step():
    def client(feed, desk, pool):
        feed.start(Progress(next_step=5))
        feed.pull(5, 0)
        feed.acknowledge(5, {})
        feed.start(Progress(next_step=4))
        return feed.pull(4, 0).step, feed.pull(4, 1).step

    assert with_trainers(client) == ((4, 4), [Progress(5), Progress(4)])


def test_trainers_wait_until_the_controller_knows_what_belongs_to_their_step():
    async def scenario():
        desk = Desk(EnginePool([]), two_group_batch, lambda *row: None, 9)
        (port,) = free_ports(1)
        async with desk.serve("127.0.0.1", port):
            feed = Feed(f"http://127.0.0.1:{port}", batch_timeout_s=10)
            starting = asyncio.create_task(asyncio.to_thread(feed.start, Progress(next_step=5)))
            assert await desk.started() == Progress(next_step=5)
            await asyncio.sleep(0.1)
            assert not starting.done()
            desk.go_on()
            await starting
            feed.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_start_that_takes_long_is_asked_for_again_and_happens_once(monkeypatch):
    monkeypatch.setattr("megatron_magistral.rollout.desk.LONG_POLL_S", 0.02)

    async def scenario():
        desk = Desk(EnginePool([]), two_group_batch, lambda *row: None, 9)
        (port,) = free_ports(1)
        async with desk.serve("127.0.0.1", port):
            feed = Feed(f"http://127.0.0.1:{port}", batch_timeout_s=10)
            starting = asyncio.create_task(asyncio.to_thread(feed.start, Progress(next_step=5)))
            await desk.started()
            await asyncio.sleep(0.2)
            desk.go_on()
            await starting
            feed.close()
            return desk._begun.is_set()

    assert asyncio.run(asyncio.wait_for(scenario(), 30)) is False


def test_what_is_opened_for_trainers_that_are_gone_is_closed_to_the_new_ones(monkeypatch):
    monkeypatch.setattr("megatron_magistral.rollout.desk.LONG_POLL_S", 0.02)

    async def scenario():
        desk = Desk(EnginePool([]), two_group_batch, lambda *row: None, 9)
        (port,) = free_ports(1)
        async with desk.serve("127.0.0.1", port):
            feed = Feed(f"http://127.0.0.1:{port}", batch_timeout_s=10)
            for step in (5, 4):
                starting = asyncio.create_task(asyncio.to_thread(feed.start, Progress(step)))
                await desk._begun.wait()
                desk.open()
                await desk.started()
                desk.go_on()
                await starting
            feed._batch_timeout_s = 0.1
            with pytest.raises(FeedError, match="no batch for step 4"):
                await asyncio.to_thread(feed.pull, 4, 0)
            feed.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


# --- what ranks are told instead of a batch ----------------------------------------------------


async def no_batch(step):
    await asyncio.Event().wait()


def test_a_run_that_is_to_stop_says_so_to_every_rank_that_waits():
    def client(feed, desk, pool):
        with ThreadPoolExecutor(1) as rank_1:
            waiting = rank_1.submit(feed.pull, 0, 1)
            desk.stop()
            return waiting.result(timeout=10), feed.pull(0, 0)

    assert with_desk(client, next_batch=no_batch)[0] == (Instead.STOP, Instead.STOP)


def test_a_step_that_one_rank_has_begun_is_ended_by_all_before_the_run_stops():
    def client(feed, desk, pool):
        feed.pull(0, 0)
        desk.stop()
        step = feed.pull(0, 1).step
        feed.acknowledge(0, {})
        return step, feed.pull(1, 0)

    assert with_desk(client)[0] == (0, Instead.STOP)


def test_every_rank_publishes_once_for_an_engine_that_came_back_while_they_wait():
    def client(feed, desk, pool):
        feed.end_update(0)
        with ThreadPoolExecutor(1) as rank_1:
            waiting = rank_1.submit(feed.pull, 0, 1)
            pool.wants_update = True
            told = waiting.result(timeout=10), feed.pull(0, 0)
        feed.begin_update(0)
        feed.end_update(0)
        desk.stop()  # each has published: what they wait for now is the batch
        return told, feed.pull(0, 1, num_updates=1)

    told = (Instead.PUBLISH, Instead.PUBLISH)
    assert with_desk(client, next_batch=no_batch)[0] == (told, Instead.STOP)


def test_no_rank_publishes_in_a_step_that_another_has_begun():
    def client(feed, desk, pool):
        feed.end_update(0)
        feed.pull(0, 0)
        pool.wants_update = True
        return feed.pull(0, 1).step

    assert with_desk(client)[0] == 0


def test_a_batch_that_does_not_come_is_an_error_that_says_what_it_waits_for(monkeypatch):
    monkeypatch.setattr("megatron_magistral.rollout.desk.LONG_POLL_S", 0.02)

    def client(feed, desk, pool):
        feed.start(Progress())
        feed._batch_timeout_s = 0.1
        desk._next_batch = no_batch
        with pytest.raises(FeedError, match="no batch for step 0 after 0 s: group 3, due 7"):
            feed.pull(0, 0)

    with_trainers(client, waiting_for=lambda: "group 3, due 7")
