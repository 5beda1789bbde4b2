"""The judge on real programs in the real jail."""

import asyncio
import threading
import time

import pytest

from tests.sandbox.conftest import request
from verifier_sandbox.jail.files import SealedFile
from verifier_sandbox.jail.wire import Compare, Profile, Span, TestSpans
from verifier_sandbox.judge import execute
from verifier_sandbox.judge.job import program_limits
from verifier_sandbox.judge.judge import BadRequestError
from verifier_sandbox.protocol import Limits, Verdict

pytestmark = pytest.mark.sandbox

SUM_PY = "a, b = map(int, input().split())\nprint(a + b)\n"
SUM_CPP = '#include <cstdio>\nint main() { int a, b; scanf("%d %d", &a, &b); printf("%d", a + b); }'
# Right below 20, wrong from there on.
HALF_PY = "a, b = map(int, input().split())\nprint(a + b if a < 20 else 0)\n"
SUMS = [(f"{i} {i}", f"{2 * i}\n") for i in range(40)]


def double(a: int) -> tuple[str, str]:
    return f"[{a}]", str(2 * a)


def test_same_tests_for_a_whole_group_are_in_the_record(bench):
    results = bench.judge_all(request(SUM_PY, SUMS, num_tests=20) for _ in range(4))
    assert all(result.verdict is Verdict.OK for result in results)
    assert len({tuple(result.test_ids) for result in results}) == 1
    assert [test.test_id for test in results[0].per_test] == results[0].test_ids


@pytest.mark.parametrize("source", [SUM_PY, HALF_PY, "print(1)", "1/0"])
def test_stopping_at_the_first_failure_does_not_change_the_score(bench, source):
    stopped, complete = bench.judge_all(
        request(source, SUMS, stop_at_first_failure=stop) for stop in (True, False)
    )
    assert (stopped.verdict, stopped.score) == (complete.verdict, complete.score)
    assert len(complete.per_test) == 20
    shared = len(stopped.per_test)
    assert [t.verdict for t in stopped.per_test] == [t.verdict for t in complete.per_test[:shared]]


def test_all_tests_count_when_nothing_stops(bench):
    result = bench.judge(request(HALF_PY, SUMS, num_tests=40, stop_at_first_failure=False))
    assert (result.num_passed, result.num_tests) == (20, 40)


def test_cpu_and_memory_of_each_test_are_metered(bench):
    spender = "x = b'x' * (100 << 20)\nfor _ in range(3000000): pass\nprint('safe')"
    idler = "import time\ntime.sleep(0.3)\nprint('safe')"
    spent, idled = (r.per_test[0] for r in bench.judge_all([request(spender), request(idler)]))
    assert 100 < spent.peak_memory_mib < 150
    assert spent.cpu_ms > 20
    assert idled.cpu_ms < 100 < 300 <= idled.wall_ms


def test_same_program_compiles_once(bench):
    source = SUM_CPP + "// same program compiles once"
    results = bench.judge_all(request(source, SUMS, language="cpp") for _ in range(4))
    assert [r.verdict for r in results] == [Verdict.OK] * 4
    assert sorted(r.compile.cached for r in results) == [False, True, True, True]


def test_compile_errors_come_with_the_compilers_words(bench):
    result = bench.judge(request("int main() { return x; }", language="cpp"))
    assert result.verdict is Verdict.COMPILE_ERROR
    assert "solution.cpp:1" in result.compile.messages
    assert "was not declared" in result.compile.messages


def test_output_is_the_same_for_every_run(bench):
    # The order of a set of strings follows the hash seed.
    source = "print([*map(str, {str(i) for i in range(50)})], hash('order'))"
    outputs = [output_of(bench, source) for _ in range(3)]
    assert len(set(outputs)) == 1
    assert outputs[0].count(b"'") == 100


def output_of(bench, source: str) -> bytes:
    """What a Python program prints."""

    async def run() -> bytes:
        limits = program_limits(Profile.PYTHON, Limits(), under_pressure=True)
        async with bench.service.pool.slot() as slot:
            with SealedFile([source.encode()]) as file, SealedFile([b""]) as blob:
                tests = [TestSpans(Span(0, 0))]
                programs = [(limits, file.fd)]
                await slot.launcher.run(programs, blob.fd, tests, Compare.NEVER, 120)
            return slot.launcher.output(1 << 16)

    return bench.await_(run())


# Function calls


def test_function_results_are_compared_outside(bench):
    tests = [double(3), double(-5)]
    good = "def double(a):\n    print('noise')\n    return 2 * a"
    solution = "class Solution:\n    def double(self, a):\n        return 2 * a"
    for source in (good, solution):
        assert bench.judge(request(source, tests, function_name="double")).verdict is Verdict.OK


@pytest.mark.parametrize(
    "source",
    [
        "class Any:\n    def __eq__(self, other): return True\ndef double(a): return Any()",
        "class L(list):\n    def __eq__(self, other): return True\ndef double(a): return L([1])",
        "class I(int):\n    def __eq__(self, other): return True\n"
        "    def __repr__(self): return '6'\ndef double(a): return I(1)",
        "import json\njson.dumps = lambda *a, **k: '6'\ndef double(a): return 1",
        "import builtins\nbuiltins.print = None\ndef double(a): return True",
        "def double(a):\n    import os\n    os.write(1, b'6')\n    os._exit(0)",
        "def other(a): return 2 * a",
    ],
)
def test_function_call_hacks_gain_nothing(bench, source):
    result = bench.judge(request(source, [double(3)], function_name="double"))
    assert result.verdict in (Verdict.WRONG_ANSWER, Verdict.RUNTIME_ERROR)


def test_function_call_tests_must_be_json(bench):
    with pytest.raises(BadRequestError, match="JSON"):
        bench.judge(request("def f(): pass", [("3", "4")], function_name="f"))


# Numbers too large for a float, or for `int`

HUGE_FLOAT = "def f(x): return 10**400"
HUGE_EXPECTED = "1" + "0" * 5000
RETURNS_HUGE = "import sys\nsys.set_int_max_str_digits(0)\ndef f(x): return 10**5000"


@pytest.mark.parametrize(
    ("source", "expected", "checker", "verdict"),
    [
        (HUGE_FLOAT, "1.5", "floats", Verdict.WRONG_ANSWER),
        (RETURNS_HUGE, HUGE_EXPECTED, "tokens", Verdict.OK),
        (RETURNS_HUGE, HUGE_EXPECTED[:-1] + "1", "tokens", Verdict.WRONG_ANSWER),
    ],
    ids=["no-float", "no-int", "no-int-and-wrong"],
)
def test_huge_integers_are_judged(bench, source, expected, checker, verdict):
    result = bench.judge(request(source, [("[1]", expected)], function_name="f", checker=checker))
    assert result.verdict is verdict, result.detail


# Long outputs

FLOOD = "import os\nrest = b'1' * (1 << 20)\nwhile rest: rest = rest[os.write(1, rest):]"


def test_a_long_output_is_compared_outside_the_event_loop(bench, monkeypatch):
    threads = []
    compare = execute._compare_now

    def record(*parts):
        threads.append(threading.get_ident())
        return compare(*parts)

    monkeypatch.setattr(execute, "_compare_now", record)
    assert bench.judge(request(FLOOD)).verdict is Verdict.WRONG_ANSWER
    assert bench.call(threading.get_ident) not in threads
    assert len(threads) == 1


def test_a_deadline_holds_while_outputs_are_compared(bench, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(execute, "_compare_now", lambda *_: may_end.wait(60))
    try:
        result = bench.judge(request(FLOOD, deadline_s=3))
        assert result.verdict is Verdict.INFRASTRUCTURE
        assert "deadline of 3 s passed" in result.detail
        assert not may_end.is_set()
    finally:
        may_end.set()


# A signal that is not what it says


@pytest.mark.parametrize("source", ["import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)"])
def test_a_self_made_time_limit_is_a_crash_and_wastes_no_second_run(bench, source):
    result = bench.judge(request(source))
    assert (result.verdict, result.num_reruns) == (Verdict.RUNTIME_ERROR, 0)
    assert "SIGXCPU" in result.detail


# Faults of the judge itself, and of the machine


def test_a_fault_of_the_judge_is_no_verdict_and_is_counted(bench, monkeypatch, caplog):
    def fails(*_):
        raise ZeroDivisionError("in the judge")

    monkeypatch.setattr(execute, "_compare_now", fails)
    before = bench.service.judge.num_internal_errors
    result = bench.judge(request("print('wrong')"))
    assert result.verdict is Verdict.INFRASTRUCTURE
    assert "ZeroDivisionError: in the judge" in result.detail
    assert result.num_tests == 1
    assert bench.service.judge.num_internal_errors == before + 1
    assert "Traceback" in caplog.text
    monkeypatch.undo()
    assert bench.judge(request("print('safe')")).verdict is Verdict.OK


def test_killed_launcher_costs_nobody_a_verdict(bench):
    slow = "import time\ntime.sleep(0.4)\n" + SUM_PY

    async def run():
        pool = bench.service.pool
        before = pool.num_restarts
        jobs = [
            asyncio.create_task(bench.service.judge.judge(request(slow, SUMS[:3])))
            for _ in range(4)
        ]
        await asyncio.sleep(0.6)
        pids = [slot.launcher.pid for slot in pool._slots]
        for slot in pool._slots:
            slot.launcher.kill()
        results = await asyncio.gather(*jobs)
        return results, pids, pool.num_restarts - before

    results, pids, num_restarts = bench.await_(run())
    assert [result.verdict for result in results] == [Verdict.OK] * 4
    assert num_restarts == len(pids)
    assert sum(result.num_retries for result in results) >= 1


def test_deadline_is_no_verdict_and_frees_the_slot(bench):
    result = bench.judge(request("while True: pass", SUMS, num_tests=5, deadline_s=0.5))
    assert result.verdict is Verdict.INFRASTRUCTURE
    assert result.num_tests == len(result.test_ids) == 5
    assert "deadline" in result.detail
    begin = time.monotonic()
    assert bench.judge(request("print('safe')")).verdict is Verdict.OK
    assert time.monotonic() - begin < 60
    assert bench.service.pool.num_busy == 0
