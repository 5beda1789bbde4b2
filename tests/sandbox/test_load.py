"""Verdicts do not depend on load, and runs leave nothing behind.

The full proofs (0 of 200 false time limits at 16 x oversubscription; 100,000 runs without a leak)
take about 20 minutes: `pytest -m slow tests/sandbox/test_load.py`.
"""

import asyncio
import contextlib
import multiprocessing
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.sandbox.conftest import request
from verifier_sandbox.protocol import Limits, Verdict

pytestmark = pytest.mark.sandbox

# Spends half its limit: a wall-clock timer fails it as soon as three share a core.
BUSY_CPP = """
#include <cstdio>
#include <ctime>
int main() { while (clock() < CLOCKS_PER_SEC / 4) {} puts("safe"); }
"""
BUSY_PY = "import time\nwhile time.process_time() < 0.25: pass\nprint('safe')"
# Runs in short pieces and sleeps between them, 20 ms in all; it queues for a core at every wake.
NAPPING_PY = (
    "import time\nfor _ in range(20):\n    time.sleep(0.001)\n"
    "    for _ in range(99999): pass\nprint('safe')"
)


def spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def oversubscribed(factor: int):
    """`factor` spinning processes a core."""
    context = multiprocessing.get_context("spawn")
    spinners = [context.Process(target=spin) for _ in range(factor * len(os.sched_getaffinity(0)))]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
        for spinner in spinners:
            spinner.join()


def judge_under_load(bench, num_requests: int, factor: int) -> Counter:
    limits = Limits(cpu_s=0.5)
    programs = [("cpp", BUSY_CPP), ("python", BUSY_PY), ("python", NAPPING_PY)]
    bench.judge(request(BUSY_CPP, language="cpp", limits=limits))  # compiles before the load
    with oversubscribed(factor):
        results = bench.judge_all(
            request(source, language=language, limits=limits)
            for i in range(num_requests)
            for language, source in [programs[i % len(programs)]]
        )
    return Counter(result.verdict for result in results)


def test_no_false_time_limit_on_a_busy_machine(bench):
    assert judge_under_load(bench, 6, factor=4) == {Verdict.OK: 6}


@pytest.mark.slow
def test_no_false_time_limit_of_200_at_16_x_oversubscription(bench):
    verdicts = Counter()
    for _ in range(20):
        verdicts += judge_under_load(bench, 10, factor=16)
    assert verdicts == {Verdict.OK: 200}


def test_true_time_limits_are_found_on_a_busy_machine(bench):
    limits = Limits(cpu_s=0.3)
    with oversubscribed(2):
        results = bench.judge_all(
            [request("while True: pass", limits=limits), request(SLEEP, limits=limits)]
        )
    assert [result.verdict for result in results] == [Verdict.TIME_LIMIT] * 2


SLEEP = "import time\ntime.sleep(1000)"


def test_a_test_in_doubt_is_run_again_alone(bench, monkeypatch):
    monkeypatch.setattr("verifier_sandbox.judge.judge.under_pressure", lambda: True)
    # Between once and 1.5 times the limit, whatever the machine does.
    source = "import time\nwhile time.process_time() < 0.6: pass\nprint('safe')"
    result = bench.judge(request(source, limits=Limits(cpu_s=0.5)))
    assert (result.verdict, result.num_reruns) == (Verdict.TIME_LIMIT, 1)


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def children(pid: int) -> list[tuple[int, str]]:
    """(pid, state) of the processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid:
                found.append((int(stat.parent.name), state))
    return found


def run_many(bench, num_runs: int) -> None:
    """Runs of every kind of end, in submissions of 100 tests."""
    ends = ["print('safe')", "1/0", "import os; os.abort()", "import os\nos.fork()"]
    cpp_ends = ['puts("safe");', "return 3;", "*(volatile int*)0 = 1;", "fork();"]
    sources = [("python", source) for source in ends] + [
        ("cpp", "#include <cstdio>\n#include <unistd.h>\nint main() { %s }" % end)  # noqa: UP031
        for end in cpp_ends
    ]
    tests = [(str(i), "safe") for i in range(100)]
    done = 0
    while done < num_runs:
        batch = [
            request(source, tests, num_tests=100, language=language, stop_at_first_failure=False)
            for language, source in sources
        ]
        results = bench.judge_all(batch)
        assert all(len(result.per_test) == 100 for result in results)
        done += 100 * len(results)


def no_more(now: list[int], then: list[int]) -> bool:
    """Fewer are no leak: this process may close what other tests have left to it."""
    return all(a <= b for a, b in zip(now, then, strict=True))


def check_no_leak(bench, num_runs: int) -> None:
    launchers = [slot.launcher.pid for slot in bench.service.pool._slots]

    def count() -> list[int]:
        return [open_descriptors(pid) for pid in [os.getpid(), *launchers]]

    run_many(bench, 800)
    before = count()
    for _ in range(4):  # a slot opens what it needs with its first run of a kind; a leak goes on
        run_many(bench, 800)
        counted = count()
        settled, before = no_more(counted, before), counted
        if settled:
            break
    restarts = bench.service.pool.num_restarts
    run_many(bench, num_runs)
    assert bench.service.pool.num_restarts == restarts
    assert no_more(count(), before)
    for pid in launchers:
        below = children(pid)
        assert len(below) <= 1, "only the zygote stays"
        assert all(state != "Z" for _, state in below)
        assert all(children(zygote) == [] for zygote, _ in below)
        assert open_descriptors(pid) < 40


def test_runs_leave_no_zombie_and_no_descriptor(bench):
    check_no_leak(bench, 1600)


@pytest.mark.slow
def test_100_000_runs_leave_no_zombie_and_no_descriptor(bench):
    check_no_leak(bench, 100_000)


def test_cancelled_requests_leave_nothing_running(bench):
    async def run() -> None:
        jobs = [
            asyncio.create_task(bench.service.judge.judge(request("while True: pass")))
            for _ in range(6)
        ]
        await asyncio.sleep(0.5)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    bench.await_(run())
    assert bench.service.pool.num_busy == 0
    assert bench.judge(request("print('safe')")).verdict is Verdict.OK
    for slot in bench.service.pool._slots:
        assert all(children(zygote) == [] for zygote, _ in children(slot.launcher.pid))


def test_a_cancellation_at_any_moment_stops_the_program(bench):
    # Also between the fork of a Python program and the news of it.
    async def run() -> None:
        for i in range(40):
            job = asyncio.create_task(bench.service.judge.judge(request("while True: pass")))
            await asyncio.sleep(i * 0.0005)
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)

    bench.await_(run())
    assert bench.service.pool.num_busy == 0
    for slot in bench.service.pool._slots:
        assert all(children(zygote) == [] for zygote, _ in children(slot.launcher.pid))
