"""An engine that keeps its version while it is evaluated; the others go on with newer weights."""

from __future__ import annotations

import asyncio

import pytest

from megatron_magistral.rollout.engine_pool import EnginePool, PinLost
from megatron_magistral.rollout.engine_state import EngineState
from tests.rollout.test_engine_pool import SAMPLING, Engine, ready, run, serve, settle, state


def serving(*names: str, version: int = 3) -> tuple[EnginePool, list[Engine]]:
    engines = [ready(name) for name in names]
    pool = EnginePool(engines)
    serve(pool, engines, version)
    return pool, engines


def by_name(engines: list[Engine], name: str) -> Engine:
    return next(engine for engine in engines if engine.name == name)


def test_a_pinned_engine_keeps_its_version_through_an_update_of_the_others():
    async def scenario():
        pool, engines = serving("e0", "e1")
        async with pool.pinned() as pin:
            assert pool.pinned_engines == [pin.engine]
            others = [engine for engine in engines if engine.name != pin.engine]
            pool.close_gate(4)
            serve(pool, others, 4)
            completion = await pool.generate_on(pin, [1], SAMPLING)
            assert {span.version for span in completion.spans} == {3}
            assert pool.version == 4

    run(scenario)


def test_a_pinned_engine_gets_no_other_requests():
    async def scenario():
        pool, engines = serving("e0", "e1")
        async with pool.pinned() as pin:
            for _ in range(4):
                await pool.generate([1], SAMPLING)
            assert by_name(engines, pin.engine).salts == []

    run(scenario)


def test_requests_that_were_in_flight_on_it_end_there():
    async def scenario():
        engines = [Engine("e0"), Engine("e1")]
        pool = EnginePool(engines)
        serve(pool, engines, 3)
        requests = [asyncio.create_task(pool.generate([1], SAMPLING)) for _ in range(2)]
        await settle()
        async with pool.pinned():
            for engine in engines:
                engine.may_answer.set()
            await asyncio.gather(*requests)
            assert pool.num_retried == 0

    run(scenario)


def test_released_behind_the_others_it_waits_for_the_next_update():
    async def scenario():
        pool, engines = serving("e0", "e1")
        async with pool.pinned() as pin:
            others = [engine for engine in engines if engine.name != pin.engine]
            serve(pool, others, 4)
        assert state(pool, by_name(engines, pin.engine)) is EngineState.STALE
        serve(pool, engines, 5)
        assert state(pool, by_name(engines, pin.engine)) is EngineState.HEALTHY

    run(scenario)


def test_released_before_an_update_it_serves_on():
    async def scenario():
        pool, engines = serving("e0", "e1")
        async with pool.pinned() as pin:
            pass
        assert state(pool, by_name(engines, pin.engine)) is EngineState.HEALTHY
        assert pool.pinned_engines == []

    run(scenario)


def test_the_only_healthy_engine_is_not_spared():
    async def scenario():
        pool, _ = serving("e0")
        with pytest.raises(PinLost, match="no engine to spare for version 3"):
            async with pool.pinned():
                pass

    run(scenario)


def test_a_pinned_engine_that_breaks_ends_the_evaluation_and_nothing_else():
    async def scenario():
        engines = [Engine("e0"), Engine("e1")]
        pool = EnginePool(engines)
        serve(pool, engines, 3)
        with pytest.raises(PinLost, match="broke"):
            async with pool.pinned() as pin:
                broken = by_name(engines, pin.engine)
                request = asyncio.create_task(pool.generate_on(pin, [1], SAMPLING))
                await settle()
                broken.interrupt()
                await request
        for engine in engines:
            engine.may_answer.set()
        await pool.generate([1], SAMPLING)
        await pool.close()

    run(scenario)


def test_a_pinned_engine_that_refuses_a_request_ends_the_evaluation_and_nothing_else():
    async def scenario():
        pool, engines = serving("e0", "e1")
        with pytest.raises(PinLost, match="HTTP 500"):
            async with pool.pinned() as pin:
                by_name(engines, pin.engine).refusals = ["HTTP 500"]
                await pool.generate_on(pin, [1], SAMPLING)
        await pool.generate([1], SAMPLING)
        await pool.close()

    run(scenario)


def test_an_engine_that_training_needs_is_taken_from_the_evaluation():
    """Where no other engine could be updated, the pinned one is."""

    async def scenario():
        pool, engines = serving("e0", "e1")
        async with pool.pinned() as pin:
            serve(pool, [by_name(engines, pin.engine)], 4)
            with pytest.raises(PinLost, match="no longer kept at version 3"):
                await pool.generate_on(pin, [1], SAMPLING)
            assert pool.pinned_engines == []
        await pool.close()

    run(scenario)
