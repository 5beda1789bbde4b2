"""Who runs when: order of arrival, bounds, exclusiveness. The launchers here are fakes."""

import asyncio

import pytest

from verifier_sandbox import pool as pool_module
from verifier_sandbox.jail.launcher import LauncherDiedError
from verifier_sandbox.pool import MAX_ATTEMPTS, OverloadedError, SlotPool


class FakeLauncher:
    """Counts its kind."""

    num_started = 0
    pid = 1

    @classmethod
    def start(cls, jail, slot):
        cls.num_started += 1
        return cls()

    def kill(self):
        pass

    def close(self):
        pass


@pytest.fixture
def make_pool(monkeypatch):
    monkeypatch.setattr(pool_module, "Launcher", FakeLauncher)
    FakeLauncher.num_started = 0

    def make(num_slots: int, max_queue: int | None = None) -> SlotPool:
        pool = SlotPool(None, num_slots, max_queue)
        pool.start()
        return pool

    return make


def test_no_more_run_than_there_are_slots(make_pool):
    async def main():
        pool, running, most = make_pool(3), 0, 0

        async def job():
            nonlocal running, most
            async with pool.slot():
                running += 1
                most = max(most, running)
                await asyncio.sleep(0)
                running -= 1

        await asyncio.gather(*(job() for _ in range(20)))
        return most, pool.num_busy

    assert asyncio.run(main()) == (3, 0)


def test_slots_go_in_order_of_arrival_and_begun_work_goes_first(make_pool):
    async def main():
        pool, order = make_pool(1), []

        async def job(name, **how):
            async with pool.slot(**how):
                order.append(name)

        async with pool.slot():
            jobs = [asyncio.create_task(job(name)) for name in "abc"]
            await asyncio.sleep(0)
            jobs.append(asyncio.create_task(job("begun", first=True)))
            await asyncio.sleep(0)
        await asyncio.gather(*jobs)
        return order

    assert asyncio.run(main()) == ["begun", "a", "b", "c"]


def test_begun_work_goes_in_order_too_and_never_starves_the_new(make_pool):
    async def main():
        pool, order = make_pool(2), []

        async def job(name, **how):
            async with pool.slot(**how):
                order.append(name)
                await asyncio.sleep(0)

        async with pool.slot(), pool.slot():
            jobs = [asyncio.create_task(job(f"new {i}")) for i in range(2)]
            kinds = ["first", "exclusive", "first", "first", "first", "first"]
            for i, kind in enumerate(kinds):
                jobs.append(asyncio.create_task(job(f"begun {i}", **{kind: True})))
                await asyncio.sleep(0)
        await asyncio.gather(*jobs)
        return order

    order = asyncio.run(main())
    assert [name for name in order if name.startswith("begun")] == [f"begun {i}" for i in range(6)]
    assert order.index("new 0") == 2  # after as many as there are slots
    assert order.index("new 1") == 5


def test_exclusive_work_runs_alone_and_nobody_waits_for_ever(make_pool):
    async def main():
        pool, running, seen = make_pool(3), 0, []

        async def job(exclusive):
            nonlocal running
            async with pool.slot(exclusive=exclusive):
                running += 1
                await asyncio.sleep(0.001)
                if exclusive:
                    seen.append(running)
                running -= 1

        await asyncio.gather(*(job(i % 4 == 0) for i in range(40)))
        return seen, pool.num_busy

    assert asyncio.run(main()) == ([1] * 10, 0)


def test_cancelled_waiters_lose_no_slot(make_pool):
    async def main():
        pool = make_pool(1)

        async def job(exclusive):
            async with pool.slot(exclusive=exclusive):
                await asyncio.sleep(0.001)

        async with pool.slot():
            jobs = [asyncio.create_task(job(i % 3 == 0)) for i in range(9)]
            await asyncio.sleep(0)
            for one in jobs[::2]:
                one.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        async with asyncio.timeout(5), pool.slot():
            return pool.num_busy

    assert asyncio.run(main()) == 1


def test_a_full_queue_turns_away_and_says_for_how_long(make_pool):
    pool = make_pool(1, max_queue=2)
    with pool.admission(), pool.admission():
        with pool.admission():  # one runs and two wait, whatever they wait for
            assert pool.num_unfinished == 3
            with pytest.raises(OverloadedError) as refusal, pool.admission():
                pass
        with pool.admission():
            pass
    assert pool.num_unfinished == 0
    assert refusal.value.retry_after_s >= 1


def test_dead_launchers_are_replaced_and_the_work_done_again(make_pool):
    async def main():
        pool, attempts, retries = make_pool(1), [], []

        async def work(launcher):
            attempts.append(launcher)
            if len(attempts) < MAX_ATTEMPTS:
                raise LauncherDiedError("killed")
            return "done"

        async with pool.slot() as slot:
            result = await slot.attempt(work, lambda: retries.append(1))
        return result, len(set(map(id, attempts))), len(retries), pool.num_restarts

    assert asyncio.run(main()) == ("done", MAX_ATTEMPTS, MAX_ATTEMPTS - 1, MAX_ATTEMPTS - 1)


def test_a_machine_that_always_fails_is_reported(make_pool):
    async def main():
        pool = make_pool(1)

        async def work(launcher):
            raise LauncherDiedError("killed")

        async with pool.slot() as slot:
            await slot.attempt(work, lambda: None)

    with pytest.raises(LauncherDiedError):
        asyncio.run(main())
    assert FakeLauncher.num_started == 1 + MAX_ATTEMPTS
