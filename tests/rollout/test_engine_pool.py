import asyncio

from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.rollout.generator import SamplingSettings
from tests.fakes import completion_of

SAMPLING = SamplingSettings(max_new_tokens=4)


class Engine:
    """Answers when told to; keeps the salts of its requests."""

    def __init__(self):
        self.salts = []
        self.may_answer = asyncio.Event()

    async def generate(self, prompt_ids, sampling, *, cache_salt):
        self.salts.append(cache_salt)
        await self.may_answer.wait()
        return completion_of()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_no_request_shares_a_cache_salt_with_requests_of_older_weights():
    async def scenario():
        engine = Engine()
        engine.may_answer.set()
        pool = EnginePool([engine])
        for version in (0, 0, 1, 2):
            pool.open_gate(version)
            await pool.generate([1], SAMPLING)
        first, again, *newer = engine.salts
        assert first == again
        assert len({first, *newer}) == 3

    asyncio.run(scenario())


def test_requests_wait_for_the_first_weights_and_while_weights_change():
    async def scenario():
        engine = Engine()
        engine.may_answer.set()
        pool = EnginePool([engine])
        waiting = asyncio.create_task(pool.generate([1], SAMPLING))
        await settle()
        assert engine.salts == []
        pool.open_gate(0)
        await waiting
        pool.close_gate()
        held = asyncio.create_task(pool.generate([1], SAMPLING))
        await settle()
        assert len(engine.salts) == 1
        pool.open_gate(1)
        await held
        assert len(engine.salts) == 2

    asyncio.run(scenario())


def test_a_request_goes_to_the_engine_with_the_fewest():
    async def scenario():
        engines = [Engine(), Engine()]
        pool = EnginePool(engines)
        pool.open_gate(0)
        tasks = [asyncio.create_task(pool.generate([1], SAMPLING)) for _ in range(5)]
        await settle()
        assert sorted(len(engine.salts) for engine in engines) == [2, 3]
        for engine in engines:
            engine.may_answer.set()
        await asyncio.gather(*tasks)

    asyncio.run(scenario())
