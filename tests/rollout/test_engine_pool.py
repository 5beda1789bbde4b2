"""Which engine gets which request, and what becomes of requests whose engine fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from megatron_magistral.cluster import free_ports
from megatron_magistral.rollout.completion import NewTokens
from megatron_magistral.rollout.desk import Desk
from megatron_magistral.rollout.engine import EngineRefused, EngineTimeout, Phase
from megatron_magistral.rollout.engine_pool import EnginePool, NoEngineLeft, PoolSettings
from megatron_magistral.rollout.engine_state import EngineState
from megatron_magistral.rollout.generator import GenerationInterrupted, SamplingSettings
from megatron_magistral.trainer.feed import Feed
from megatron_magistral.types import Completion, FinishReason, Span
from tests.fakes import completion_of

SAMPLING = SamplingSettings(max_new_tokens=4)
NEVER = 60.0


def tokens(*versions: int, finish: FinishReason = FinishReason.STOP) -> Completion:
    """One token of each of `versions`; its id is its place."""
    return Completion(
        prompt_ids=(1,),
        output_ids=tuple(range(len(versions))),
        logprobs=(-0.5,) * len(versions),
        spans=tuple(Span(version, i, i + 1) for i, version in enumerate(versions)),
        finish_reason=finish,
        text="",
    )


class Engine:
    """Answers when told to; keeps the salts and partials of its requests; can break and die."""

    def __init__(self, name: str = "e0") -> None:
        self.name = name
        self.salts: list[str] = []
        self.partials: list[Completion | None] = []
        self.told: list[Callable[..., None] | None] = []
        self.may_answer = asyncio.Event()
        self.broken = asyncio.Event()
        self.alive = asyncio.Event()
        self.alive.set()
        self.held = 0
        self.answers: list[Completion] = []
        self.left_behind = tokens(0, finish=FinishReason.ABORT)
        self.num_abandoned = 0
        self.refusals: list[str] = []
        self.says: NewTokens | None = None

    async def generate(self, prompt_ids, sampling, *, cache_salt, partial=None, on_tokens=None):
        self.salts.append(cache_salt)
        self.partials.append(partial)
        self.told.append(on_tokens)
        broken = self.broken
        waiting = [asyncio.create_task(e.wait()) for e in (self.may_answer, broken)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if broken.is_set():
            raise GenerationInterrupted(self.name, 0.1, "broke", self.left_behind)
        if self.says is not None:
            on_tokens(self.says)
        if self.refusals:
            raise EngineRefused(self.name, Phase.GENERATE, 0.1, self.refusals.pop())
        return self.answers.pop(0) if self.answers else completion_of(version=self.held)

    def interrupt(self) -> None:
        self.broken.set()
        self.broken = asyncio.Event()

    async def wait_ready(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self.alive.wait(), timeout_s)
        except TimeoutError:
            raise EngineTimeout(self.name, Phase.READY, timeout_s, "silent") from None

    async def weight_version(self) -> int:
        return self.held

    async def abandon_update(self) -> None:
        self.num_abandoned += 1


def ready(name: str = "e0") -> Engine:
    engine = Engine(name)
    engine.may_answer.set()
    return engine


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def state(pool: EnginePool, engine: Engine) -> EngineState:
    return pool.statuses[engine.name].state


def serve(pool: EnginePool, engines: list[Engine], version: int) -> None:
    for engine in engines:
        engine.held = version
    pool.open_gate(version, [engine.name for engine in engines])


def test_no_request_shares_a_cache_salt_with_requests_of_older_weights():
    async def scenario():
        engine = ready()
        pool = EnginePool([engine])
        for version in (0, 0, 1, 2):
            serve(pool, [engine], version)
            await pool.generate([1], SAMPLING)
        first, again, *newer = engine.salts
        assert first == again
        assert len({first, *newer}) == 3

    run(scenario)


@pytest.mark.parametrize("over", ["weights change again", "no engine serves any more"])
def test_a_request_waits_on_if_what_it_waited_for_is_over_before_it_runs(over):
    async def scenario():
        engine = ready()
        pool = EnginePool([engine])
        waiting = asyncio.create_task(pool.generate([1], SAMPLING))
        await settle()
        serve(pool, [engine], 0)
        if over == "weights change again":
            pool.close_gate(1)
        else:
            serve(pool, [], 1)
        await settle()
        assert engine.salts == [] and not waiting.done()
        serve(pool, [engine], 1)
        await waiting
        await pool.close()

    run(scenario)


def test_requests_wait_for_the_first_weights_and_while_weights_change():
    async def scenario():
        engine = ready()
        pool = EnginePool([engine])
        waiting = asyncio.create_task(pool.generate([1], SAMPLING))
        await settle()
        assert engine.salts == []
        serve(pool, [engine], 0)
        await waiting
        pool.close_gate(1)
        held = asyncio.create_task(pool.generate([1], SAMPLING))
        await settle()
        assert len(engine.salts) == 1
        serve(pool, [engine], 1)
        await held
        assert len(engine.salts) == 2
        await pool.close()

    run(scenario)


def test_a_request_goes_to_the_engine_with_the_fewest():
    async def scenario():
        engines = [Engine("e0"), Engine("e1")]
        pool = EnginePool(engines)
        serve(pool, engines, 0)
        tasks = [asyncio.create_task(pool.generate([1], SAMPLING)) for _ in range(5)]
        await settle()
        assert sorted(len(engine.salts) for engine in engines) == [2, 3]
        for engine in engines:
            engine.may_answer.set()
        await asyncio.gather(*tasks)

    run(scenario)


def test_an_engine_without_the_newest_weights_gets_no_request_until_it_has_them():
    async def scenario():
        behind, current = ready("e0"), ready("e1")
        pool = EnginePool([behind, current])
        serve(pool, [behind, current], 0)
        serve(pool, [current], 1)
        for _ in range(4):
            await pool.generate([1], SAMPLING)
        assert state(pool, behind) is EngineState.STALE
        assert (len(behind.salts), len(current.salts)) == (0, 4)
        serve(pool, [behind, current], 2)
        await pool.generate([1], SAMPLING)
        assert len(behind.salts) == 1
        await pool.close()

    run(scenario)


def test_requests_on_a_quarantined_engine_go_on_elsewhere_with_their_tokens():
    async def scenario():
        paused, other = Engine("e0"), ready("e1")
        pool = EnginePool([paused, other])
        serve(pool, [paused], 0)
        request = asyncio.create_task(pool.generate([1], SAMPLING))
        await settle()
        other.answers = [tokens(0, 1, 1)]
        serve(pool, [other], 1)
        completion = await request
        assert [span.version for span in completion.spans] == [0, 1, 1]
        assert other.partials == [paused.left_behind]
        assert pool.num_retried == 1
        await pool.close()

    run(scenario)


def test_a_suspect_engine_that_answers_with_its_weights_is_healthy_again():
    async def scenario():
        shaky, other = Engine("e0"), ready("e1")
        pool = EnginePool([shaky, other])
        serve(pool, [shaky, other], 0)
        request = asyncio.create_task(pool.generate([1], SAMPLING))
        await settle()
        shaky.broken.set()
        await request
        await until(lambda: state(pool, shaky) is EngineState.HEALTHY)
        assert other.partials == [shaky.left_behind]

    run(scenario)


def test_an_engine_that_came_back_with_other_weights_stays_out():
    async def scenario():
        replaced, other = Engine("e0"), ready("e1")
        pool = EnginePool([replaced, other])
        serve(pool, [replaced, other], 3)
        request = asyncio.create_task(pool.generate([1], SAMPLING))
        await settle()
        replaced.held = -1  # what a restarted server says
        replaced.broken.set()
        await request
        await until(lambda: state(pool, replaced) is EngineState.STALE)

    run(scenario)


def test_tokens_of_a_server_that_was_replaced_unnoticed_are_not_used():
    async def scenario():
        replaced, other = ready("e0"), ready("e1")
        pool = EnginePool([replaced, other])
        serve(pool, [replaced, other], 3)
        replaced.answers = [tokens(-1, -1)]
        completion = await pool.generate([1], SAMPLING)
        assert {span.version for span in completion.spans} == {3}
        assert state(pool, replaced) is EngineState.STALE
        assert pool.wants_update  # else it would wait for the next step, and the step for it
        assert other.partials == [None]

    run(scenario)


def test_tokens_of_a_version_that_was_never_announced_reach_nobody():
    async def scenario():
        strange, other = ready("e0"), ready("e1")
        pool = EnginePool([strange, other])
        serve(pool, [strange, other], 3)
        strange.held = 9  # what it says when it is asked
        for says, answer in ((NewTokens(0, (5,), (-0.5,), 9), tokens(3)), (None, tokens(9))):
            strange.says, strange.answers = says, [answer]
            arrived: list[NewTokens] = []
            completion = await pool.generate([1], SAMPLING, on_tokens=arrived.append)
            assert {span.version for span in completion.spans} == {3}
            assert [new for new in arrived if new.version == 9] == []
            await until(lambda: state(pool, strange) is EngineState.STALE and pool.wants_update)
            strange.held = 3
            serve(pool, [strange, other], 3)
            strange.held = 9

    run(scenario)


def test_tokens_of_a_server_that_was_replaced_unnoticed_are_told_to_nobody():
    async def scenario():
        replaced, other = ready("e0"), ready("e1")
        pool = EnginePool([replaced, other])
        serve(pool, [replaced, other], 3)
        replaced.held, replaced.says = -1, NewTokens(0, (5,), (-0.5,), -1)
        other.held = 3
        told: list[NewTokens] = []
        completion = await pool.generate([1], SAMPLING, on_tokens=told.append)
        assert {span.version for span in completion.spans} == {3}
        assert told == []  # they would be written down, and resumed
        await until(lambda: state(pool, replaced) is EngineState.STALE and pool.wants_update)

    run(scenario)


def test_tokens_of_an_update_that_is_under_way_are_used():
    async def scenario():
        engine = Engine()
        pool = EnginePool([engine])
        serve(pool, [engine], 3)
        engine.says, engine.answers = NewTokens(0, (5,), (-0.5,), 4), [tokens(3, 4)]
        arrived: list[NewTokens] = []
        request = asyncio.create_task(pool.generate([1], SAMPLING, on_tokens=arrived.append))
        await settle()
        pool.close_gate(4)
        engine.may_answer.set()
        assert [span.version for span in (await request).spans] == [3, 4]
        assert [new.version for new in arrived] == [4]
        await pool.close()

    run(scenario)


def test_an_engine_that_refuses_or_answers_nonsense_is_left_for_another():
    async def scenario():
        shaky, other = ready("e0"), ready("e1")
        pool = EnginePool([shaky, other])
        serve(pool, [shaky, other], 0)
        shaky.refusals = ["HTTP 503"]
        await pool.generate([1], SAMPLING)
        assert len(other.salts) == 1 and pool.num_retried == 1
        await until(lambda: state(pool, shaky) is EngineState.HEALTHY)

    run(scenario)


def test_a_request_that_every_engine_refuses_ends_with_the_reason():
    async def scenario():
        engine = ready()
        engine.refusals = ["HTTP 400: too long"] * 3
        pool = EnginePool([engine], PoolSettings(max_tries=3))
        serve(pool, [engine], 0)
        with pytest.raises(NoEngineLeft, match=r"3 tries of one request, the last: .*too long"):
            await pool.generate([1], SAMPLING)

    run(scenario)


def test_a_dead_engine_is_restarted_and_stale_until_updated():
    async def scenario():
        engine, asked = Engine(), []

        async def restart(name: str) -> None:
            asked.append(name)
            engine.held = -1
            engine.alive.set()

        pool = EnginePool([engine], PoolSettings(suspect_s=0.01), restart)
        serve(pool, [engine], 0)
        engine.alive.clear()
        request = asyncio.create_task(pool.generate([1], SAMPLING))
        await settle()
        engine.broken.set()
        await until(lambda: state(pool, engine) is EngineState.STALE)
        assert asked == ["e0"] and not request.done()
        engine.broken.clear()
        engine.may_answer.set()
        serve(pool, [engine], 1)
        assert {span.version for span in (await request).spans} == {1}

    run(scenario)


def test_restarts_are_capped_and_then_every_engine_is_named():
    async def scenario():
        engine, asked = Engine(), []

        async def restart(name: str) -> None:
            asked.append(name)

        settings = PoolSettings(suspect_s=0.01, restart_s=0.01, max_restarts=2)
        pool = EnginePool([engine], settings, restart)
        serve(pool, [engine], 0)
        engine.alive.clear()
        engine.broken.set()
        with pytest.raises(NoEngineLeft, match=r"engine e0: dead \(.*silent"):
            await pool.generate([1], SAMPLING)
        assert asked == ["e0", "e0"]

    run(scenario)


def test_a_request_does_not_wait_for_an_engine_for_ever():
    async def scenario():
        engine = ready()
        pool = EnginePool([engine], PoolSettings(wait_s=0.01))
        pool.open_gate(0, [])
        with pytest.raises(NoEngineLeft, match=r"no engine for 0.01 s: engine e0: stale"):
            await pool.generate([1], SAMPLING)
        await pool.close()

    run(scenario)


def test_a_request_is_not_tried_for_ever():
    async def scenario():
        engine = ready()
        engine.broken.set()
        pool = EnginePool([engine], PoolSettings(max_tries=3))
        serve(pool, [engine], 0)
        with pytest.raises(NoEngineLeft, match="3 tries of one request"):
            await pool.generate([1], SAMPLING)
        assert len(engine.salts) == 3

    run(scenario)


def test_an_update_whose_sender_is_lost_leaves_engines_stale_and_another_sender_ends_it():
    async def scenario():
        engine = ready()
        pool = EnginePool([engine], PoolSettings(update_bound_s=0.01))
        serve(pool, [engine], 0)
        pool.close_gate(1)
        await until(lambda: engine.num_abandoned == 1)
        assert state(pool, engine) is EngineState.STALE
        assert not pool.is_open and pool.num_lost_updates == 1
        assert "update to version 1 did not end within 0.01 s" in pool.describe()
        pool.close_gate(1)
        serve(pool, [engine], 1)
        await pool.generate([1], SAMPLING)
        await asyncio.sleep(0.05)
        assert pool.num_lost_updates == 1  # the watchdog of an update ends with it

    run(scenario)


def test_engines_may_join_and_leave_while_requests_run():
    async def scenario():
        first, second = Engine("e0"), ready("e1")
        pool = EnginePool([first])
        serve(pool, [first], 0)
        request = asyncio.create_task(pool.generate([1], SAMPLING))
        await settle()
        pool.join(second)
        await settle()
        assert second.salts == []
        serve(pool, [first, second], 1)
        second.answers = [tokens(0, 1)]
        pool.leave("e0")
        await request
        assert second.partials == [first.left_behind]
        assert list(pool.statuses) == ["e1"]

    run(scenario)


def test_what_the_trainer_says_of_engines_reaches_the_pool():
    async def nothing(step: int) -> Any:
        raise AssertionError("no batch is asked for")

    async def scenario():
        pool = EnginePool([ready("e0"), ready("e1")])
        (port,) = free_ports(1)
        async with Desk(pool, nothing, lambda *row: None, 1).serve("127.0.0.1", port):
            feed = Feed(f"http://127.0.0.1:{port}", batch_timeout_s=10)
            for call in (lambda: feed.begin_update(0), lambda: feed.end_update(0, ["e1"])):
                await asyncio.to_thread(call)
            feed.close()
        assert {name: s.state for name, s in pool.statuses.items()} == {
            "e0": EngineState.STALE,
            "e1": EngineState.HEALTHY,
        }
        await pool.close()

    run(scenario)
