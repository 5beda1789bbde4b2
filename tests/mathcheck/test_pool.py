import asyncio
import os
import signal

import pytest

from tests.mathcheck.hostile import CODE, WRONG_FOR_SEVEN
from verifier_sandbox.jail import seccomp
from verifier_sandbox.mathcheck import MathVerdict, check
from verifier_sandbox.mathcheck.pool import MathLimits, MathPool

# More work than the limit of the test that wants a timeout, and bounded all the same. The limit is
# CPU time, so a busy machine does not make other jobs time out.
TINY = MathLimits(cpu_s=0.002, with_sympy=False)
QUICK = MathLimits(with_sympy=False)  # starts in a tenth of the time
SLOW = r"\sum_{k=1}^{300}\sum_{j=1}^{300}\sin(kj)"


def run(test):
    return asyncio.run(asyncio.wait_for(test, timeout=300))


def test_a_worker_answers_like_the_function():
    pairs = [("1/2", r"\boxed{0.5}"), ("7", r"\boxed{8}"), ("7", r"\boxed{7"), ("∞", r"\infty")]

    async def test():
        async with MathPool(limits=QUICK) as pool:
            return [await pool.check(*pair) for pair in pairs]

    assert run(test()) == [check(*pair) for pair in pairs]


@pytest.mark.skipif(not seccomp.is_available(), reason="no seccomp filters here")
def test_workers_are_confined_where_the_machine_can():
    async def test():
        async with MathPool(num_workers=2, limits=QUICK) as pool:
            return pool.is_confined

    assert run(test())


def test_more_cpu_time_than_allowed_is_a_timeout_of_that_job_only():
    async def test():
        async with MathPool(limits=TINY) as pool:
            slow = await pool.check(r"\pi", SLOW)
            return slow, await pool.check("7", "7"), pool.num_restarts

    slow, fast, num_restarts = run(test())
    assert slow.verdict is MathVerdict.TIMEOUT
    assert fast.verdict is MathVerdict.CORRECT
    assert num_restarts == 1


def test_a_worker_killed_between_jobs_costs_no_job():
    async def test():
        async with MathPool(limits=QUICK) as pool:
            before = await pool.check("7", "7")
            os.kill(pool.worker_pids[0], signal.SIGKILL)
            return before, await pool.check("7", "7"), len(pool.worker_pids)

    before, after, num_workers = run(test())
    assert before == after
    assert num_workers == 1


def test_a_worker_killed_in_mid_job_is_replaced_and_the_job_repeated():
    async def test():
        async with MathPool(limits=QUICK) as pool:
            (pid,) = pool.worker_pids
            os.kill(pid, signal.SIGSTOP)  # now it cannot finish before it is killed
            job = asyncio.create_task(pool.check("7", "7"))
            await asyncio.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
            return await job, pool.num_restarts

    result, num_restarts = run(test())
    assert result.verdict is MathVerdict.CORRECT
    assert num_restarts == 1


def test_a_worker_that_never_answers_is_an_internal_fault_and_not_a_verdict():
    async def test():
        async with MathPool(
            num_workers=2, limits=MathLimits(cpu_s=0.05, wall_s=3.0, with_sympy=False)
        ) as pool:
            for pid in pool.worker_pids:  # the second one takes the repetition
                os.kill(pid, signal.SIGSTOP)
            return await pool.check("7", "7"), await pool.check("7", "7")

    stopped, fresh = run(test())
    assert stopped.verdict is MathVerdict.INTERNAL
    assert "did not answer within 3.0 s" in stopped.reason
    assert fresh.verdict is MathVerdict.CORRECT


def test_a_cancelled_check_does_not_leave_its_answer_to_the_next():
    async def test():
        async with MathPool(limits=QUICK) as pool:
            os.kill(pool.worker_pids[0], signal.SIGSTOP)
            job = asyncio.create_task(pool.check("1", "1"))
            await asyncio.sleep(0.05)
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
            return await pool.check("1", "2"), len(pool.worker_pids)

    result, num_workers = run(test())
    assert result.verdict is MathVerdict.WRONG
    assert num_workers == 1


def test_a_large_parent_does_not_make_its_workers_look_worn():
    async def test():
        ballast = bytearray(400 << 20)  # more than a worker may have; every page is touched
        ballast[:: 1 << 12] = b"1" * (len(ballast) >> 12)
        async with MathPool(limits=QUICK) as pool:
            for _ in range(3):
                await pool.check("7", "7")
            return pool.num_restarts, pool.peak_rss_mib()

    num_restarts, worker_rss_mib = run(test())
    assert num_restarts == 0
    assert 1 < worker_rss_mib < 200


def test_a_worn_worker_is_replaced():
    async def test():
        async with MathPool(limits=MathLimits(recycle_jobs=3, with_sympy=False)) as pool:
            pids = set()
            for _ in range(7):
                assert (await pool.check("7", "7")).verdict is MathVerdict.CORRECT
                pids.update(pool.worker_pids)
            return pids, pool.num_restarts

    pids, num_restarts = run(test())
    assert len(pids) >= 2
    assert num_restarts == 2


def test_a_thousand_hostile_answers_leave_the_pool_at_its_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hostile = [*WRONG_FOR_SEVEN, *CODE]

    async def test():
        async with MathPool(num_workers=2, limits=QUICK) as pool:
            jobs = (pool.check("7", hostile[i % len(hostile)]) for i in range(1000))
            results = await asyncio.gather(*jobs)
            last = await pool.check("7", "7")
            return results, last, len(pool.worker_pids), pool.peak_rss_mib()

    results, last, num_workers, peak_rss_mib = run(test())
    verdicts = {result.verdict for result in results}
    assert MathVerdict.CORRECT not in verdicts
    assert MathVerdict.INTERNAL not in verdicts
    assert last.verdict is MathVerdict.CORRECT
    assert num_workers == 2
    assert peak_rss_mib < 300
    assert list(tmp_path.iterdir()) == []


def test_closing_ends_every_worker():
    async def test():
        pool = MathPool(num_workers=2, limits=QUICK)
        await pool.start()
        pids = pool.worker_pids
        await pool.close()
        return pids

    for pid in run(test()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_pool_needs_a_worker():
    with pytest.raises(ValueError, match="num_workers must be at least 1, got 0"):
        MathPool(num_workers=0)
