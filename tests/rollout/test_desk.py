"""The desk and the trainer's feed against each other, over real HTTP on the loopback interface."""

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_magistral.algorithm.batch import make_batch
from megatron_magistral.algorithm.settings import AlgorithmSettings
from megatron_magistral.cluster import free_ports
from megatron_magistral.rollout.desk import Desk
from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.trainer.feed import Feed, FeedError
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


def test_a_rank_may_ask_for_the_next_step_before_another_acknowledged_this_one():
    def client(feed, desk, pool):
        feed.pull(0, 0)
        with ThreadPoolExecutor(1) as rank_1:
            ahead = rank_1.submit(feed.pull, 1, 1)
            feed.acknowledge(0, {})
            return ahead.result(timeout=10).step

    assert with_desk(client)[0] == 1


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


def test_a_dead_controller_is_named_in_the_error():
    (port,) = free_ports(1)
    feed = Feed(f"http://127.0.0.1:{port}", batch_timeout_s=1)
    with pytest.raises(FeedError, match=r"controller: GET /steps/0/shares/0 failed after"):
        feed.pull(0, 0)


def test_a_stage_goes_on_at_the_step_that_the_trainers_name():
    def client(feed, desk, pool):
        feed.start(Progress(next_step=5, next_ordinal=12))
        with pytest.raises(FeedError, match="step 4 is trained already"):
            feed.pull(4, 0)
        assert feed.pull(5, 0).step == 5
        feed.acknowledge(5, {"loss": 0.5})
        with pytest.raises(FeedError, match="the stage has started at step 6 already"):
            feed.start(Progress())

    _, trained = with_desk(client)
    assert trained == [(5, {"loss": 0.5})]


def test_whoever_waits_for_the_start_is_told_where_it_is():
    def client(feed, desk, pool):
        feed.start(Progress(next_step=5, next_ordinal=12))
        return desk._start.result()

    start, _ = with_desk(client)
    assert start == Progress(next_step=5, next_ordinal=12)
