"""What the pool hands on to engines, and what it asks trainers for."""

from __future__ import annotations

import asyncio

from megatron_magistral.rollout.completion import NewTokens
from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.rollout.engine_state import EngineState
from megatron_magistral.types import FinishReason
from tests.rollout.test_engine_pool import (
    SAMPLING,
    Engine,
    ready,
    run,
    serve,
    settle,
    state,
    tokens,
    until,
)


def test_an_engine_that_came_back_asks_for_an_update_until_one_begins():
    async def scenario():
        engine, other = Engine("e0"), ready("e1")
        pool = EnginePool([engine, other])
        serve(pool, [engine, other], 3)
        request = asyncio.create_task(pool.generate([1], SAMPLING))
        await settle()
        assert not pool.wants_update
        engine.held = -1
        engine.broken.set()
        await request
        await until(lambda: pool.wants_update)
        pool.close_gate(3)
        assert not pool.wants_update
        serve(pool, [engine, other], 3)
        assert state(pool, engine) is EngineState.HEALTHY
        await pool.close()

    run(scenario)


def test_what_another_process_began_goes_on_and_what_arrives_is_told():
    async def scenario():
        engine = ready()
        pool = EnginePool([engine])
        serve(pool, [engine], 0)
        partial, told = tokens(0, finish=FinishReason.ABORT), []
        await pool.generate([1], SAMPLING, partial=partial, on_tokens=told.append)
        assert engine.partials == [partial]
        (tell,) = engine.told
        tell(NewTokens(1, (7,), (-0.5,), 0))
        assert told == [NewTokens(1, (7,), (-0.5,), 0)]

    run(scenario)
