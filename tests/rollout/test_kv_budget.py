"""Requests never count for more of an engine's KV cache than the stage's budget allows."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from megatron_magistral.rollout.completion import NewTokens
from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.rollout.generator import GenerationInterrupted, SamplingSettings
from megatron_magistral.rollout.kv_budget import (
    CacheTooSmall,
    Demand,
    KvBudget,
    KvLimits,
    check_caches,
)
from megatron_magistral.types import Completion, FinishReason
from tests.fakes import completion_of
from tests.rollout.test_engine_pool import Engine, run, serve, settle

SAMPLING = SamplingSettings(max_new_tokens=10)
PROMPT = [1] * 4  # with SAMPLING a request can need 14 tokens


class CountingEngine(Engine):
    """Samples completions of random lengths token by token, and knows what its cache holds. Now
    and then it breaks off a request."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name)
        self._random = random.Random(seed)
        self.held_tokens = Counter[int]()
        self.peak_tokens = self.num_requests = 0

    async def generate(self, prompt_ids, sampling, *, cache_salt, partial=None, on_tokens=None):
        self.num_requests += 1
        me, length = self.num_requests, self._random.randint(1, sampling.max_new_tokens)
        done = len(partial.output_ids) if partial else 0
        self._hold(me, len(prompt_ids) + done)
        try:
            for place in range(done, max(done, length)):
                await asyncio.sleep(0)
                self._hold(me, len(prompt_ids) + place + 1)
                on_tokens(NewTokens(place, (7,), (-0.5,), 0))
                if self._random.random() < 0.02:
                    left = completion_of(place + 1)
                    raise GenerationInterrupted(self.name, 0.1, "broke", aborted(left))
        finally:
            del self.held_tokens[me]
        return completion_of(max(done, length))

    def _hold(self, request: int, num_tokens: int) -> None:
        self.held_tokens[request] = num_tokens
        self.peak_tokens = max(self.peak_tokens, self.held_tokens.total())


def aborted(completion: Completion) -> Completion:
    return Completion(
        completion.prompt_ids,
        completion.output_ids,
        completion.logprobs,
        completion.spans,
        FinishReason.ABORT,
        "",
    )


def pool_of(engines: list[Engine], limits: KvLimits) -> EnginePool:
    pool = EnginePool(engines)
    pool.kv.set_limits(limits)
    serve(pool, engines, 0)
    return pool


@pytest.mark.parametrize("budget", [14, 50, 111])
def test_no_engine_ever_holds_more_than_the_budget(budget: int) -> None:
    async def scenario() -> None:
        engines = [CountingEngine("e0", 0), CountingEngine("e1", 1)]
        pool = pool_of(engines, KvLimits(budget))
        prompts = [[1] * random.Random(i).randint(1, 4) for i in range(150)]
        completions = await asyncio.gather(*(pool.generate(p, SAMPLING) for p in prompts))
        assert len(completions) == 150
        assert all(0 < engine.peak_tokens <= budget for engine in engines)
        assert [pool.kv.used(engine.name) for engine in engines] == [0, 0]
        await pool.close()

    run(scenario)


def test_the_budget_is_used_up_while_requests_wait() -> None:
    async def scenario() -> None:
        engines = [Engine("e0"), Engine("e1")]
        pool = pool_of(engines, KvLimits(30))
        requests = [asyncio.create_task(pool.generate(PROMPT, SAMPLING)) for _ in range(9)]
        await settle()
        assert [len(engine.salts) for engine in engines] == [2, 2]  # of 14 tokens each
        for engine in engines:
            engine.may_answer.set()
        await asyncio.gather(*requests)
        assert pool.kv.drain() == {"kv_budget_tokens": 30.0, "kv_used_tokens_max": 28.0}

    run(scenario)


def test_without_a_budget_nothing_waits_and_nothing_is_reported() -> None:
    async def scenario() -> None:
        engine = Engine("e0")
        pool = pool_of([engine], KvLimits())
        requests = [asyncio.create_task(pool.generate(PROMPT, SAMPLING)) for _ in range(99)]
        await settle()
        assert len(engine.salts) == 99
        assert pool.kv.drain() == {}
        engine.may_answer.set()
        await asyncio.gather(*requests)

    run(scenario)


def test_a_smaller_budget_stops_no_request_and_admits_none_until_there_is_room() -> None:
    async def scenario() -> None:
        engine = Engine("e0")
        pool = pool_of([engine], KvLimits(42))
        first = [asyncio.create_task(pool.generate(PROMPT, SAMPLING)) for _ in range(3)]
        await settle()
        pool.kv.set_limits(KvLimits(28))
        second = [asyncio.create_task(pool.generate(PROMPT, SAMPLING)) for _ in range(2)]
        await settle()
        assert len(engine.salts) == 3
        first[0].cancel()
        await settle()
        assert len(engine.salts) == 3  # 28 tokens are used by two
        first[1].cancel()
        await settle()
        assert len(engine.salts) == 4
        engine.may_answer.set()
        await asyncio.gather(first[2], *second)

    run(scenario)


def test_a_larger_budget_lets_requests_in_at_once() -> None:
    async def scenario() -> None:
        engine = Engine("e0")
        pool = pool_of([engine], KvLimits(14))
        requests = [asyncio.create_task(pool.generate(PROMPT, SAMPLING)) for _ in range(3)]
        await settle()
        assert len(engine.salts) == 1
        pool.kv.set_limits(KvLimits(42))
        await settle()
        assert len(engine.salts) == 3
        engine.may_answer.set()
        await asyncio.gather(*requests)

    run(scenario)


def test_a_large_request_is_not_overtaken_by_small_ones() -> None:
    async def scenario() -> None:
        engine = Engine("e0")
        pool = pool_of([engine], KvLimits(20))
        going = asyncio.create_task(pool.generate([1] * 2, SAMPLING))
        await settle()
        large = asyncio.create_task(pool.generate([1] * 10, SAMPLING))
        await settle()
        small = asyncio.create_task(pool.generate([1], SamplingSettings(max_new_tokens=1)))
        await settle()
        assert len(engine.salts) == 1  # the small one would fit beside it
        engine.may_answer.set()
        await asyncio.gather(going, large, small)

    run(scenario)


def test_a_request_counts_for_its_reserve_until_it_holds_more() -> None:
    budget = KvBudget()
    budget.set_limits(KvLimits(100, reserve=0.25))
    with budget.lease("e0", Demand(num_prompt=4, num_done=0, num_most=10)) as lease:
        assert budget.used("e0") == 4 + 3
        told: list[NewTokens] = []
        arrived = lease.counting(told.append)
        arrived(new := NewTokens(0, (1, 2), (0.0, 0.0), 0))
        assert (budget.used("e0"), told) == (7, [new])
        arrived(NewTokens(2, (1,) * 6, (0.0,) * 6, 0))
        assert budget.used("e0") == 4 + 8
    assert budget.used("e0") == 0
    assert budget.drain()["kv_used_tokens_max"] == 12


def test_what_was_generated_elsewhere_counts_at_once() -> None:
    assert Demand(num_prompt=4, num_done=8, num_most=10).tokens(reserve=0.5) == 12
    assert Demand(num_prompt=4, num_done=8, num_most=10).tokens(reserve=1.0) == 14


def test_an_evaluation_on_a_pinned_engine_keeps_its_budget_too() -> None:
    async def scenario() -> None:
        engines = [Engine("e0"), Engine("e1")]
        pool = pool_of(engines, KvLimits(30))
        async with pool.pinned() as pin:
            ours = next(engine for engine in engines if engine.name == pin.engine)
            asked = [asyncio.create_task(pool.generate_on(pin, PROMPT, SAMPLING)) for _ in range(5)]
            trained = asyncio.create_task(pool.generate(PROMPT, SAMPLING))
            await settle()
            assert len(ours.salts) == 2
            assert sum(len(engine.salts) for engine in engines) == 3  # it holds up no other
            for engine in engines:
                engine.may_answer.set()
            await asyncio.gather(*asked, trained)

    run(scenario)


class Cache:
    def __init__(self, name: str, size: int) -> None:
        self.name, self._size = name, size

    async def kv_cache_tokens(self) -> int:
        return self._size


def test_a_server_whose_cache_is_smaller_than_the_budget_is_named() -> None:
    caches = [Cache("n3:4", 1000), Cache("n4:4", 999)]
    asyncio.run(check_caches(caches, 999))
    with pytest.raises(CacheTooSmall) as error:
        asyncio.run(check_caches(caches, 1000))
    assert str(error.value) == (
        "rl.kv_budget_tokens = 1000: must be at most the tokens that the KV cache of every "
        "generator holds: n4:4 holds 999"
    )
