"""Checker programs and interactors: what they decide, and what no submission can make of them."""

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from tests.sandbox.conftest import request
from tests.sandbox.test_load import children
from verifier_sandbox.jail.wire import Profile
from verifier_sandbox.judge.helpers import fault_of
from verifier_sandbox.judge.job import helper_limits, program_limits
from verifier_sandbox.protocol import Checker, Limits, Program, Verdict

pytestmark = pytest.mark.sandbox

ANY_DIVISOR = """
import sys
number, answer = int(open(3).read()), int(open(4).read())
output = sys.stdin.read().split()
ok = len(output) == 1 and 1 < int(output[0]) <= number and number % int(output[0]) == 0
sys.exit(0 if ok else 1)
"""
ANY_DIVISOR_CPP = """
#include <cstdio>
int main() {
    FILE* input = fdopen(3, "r"); int number, output;
    if (fscanf(input, "%d", &number) != 1 || scanf("%d", &output) != 1) return 1;
    return output > 1 && number % output == 0 ? 0 : 1;
}
"""


@pytest.mark.parametrize(
    ("language", "source"), [("python", ANY_DIVISOR), ("cpp", ANY_DIVISOR_CPP)]
)
def test_checker_program_decides(bench, language, source):
    checker = Checker(kind="program", program=Program(language=language, source=source))
    tests = [("12", "2"), ("35", "5")]
    right = "n = int(input())\nprint(next(d for d in range(n, 1, -1) if n % d == 0))"
    assert bench.judge(request(right, tests, checker=checker)).verdict is Verdict.OK
    wrong = bench.judge(request("print(5)", tests, checker=checker))
    assert (wrong.verdict, wrong.detail) == (Verdict.WRONG_ANSWER, "test 0")


def checked(source: str, program: str, expected: str = "42", **fields: Any):
    checker = Checker(kind="program", program=Program(language="cpp", source=program))
    limits = Limits(cpu_s=0.5)
    return request(source, [("", expected)], checker=checker, limits=limits, **fields)


def test_a_broken_checker_program_is_nobodys_wrong_answer(bench):
    for source in ("print(42)", "print(5)"):
        result = bench.judge(checked(source, "int main() { return 9; }"))
        assert result.verdict is Verdict.INFRASTRUCTURE
        assert "checker program failed: EXITED 9, tried on the expected output" in result.detail
        assert result.num_tests == 1


CRASHES = """
#include <cstdlib>
#include <iostream>
int main() { long n; std::cin >> n; if (n < 0) abort(); return n == 42 ? 0 : 1; }
"""
SPINS = """
#include <iostream>
int main() {
    long n; std::cin >> n;
    for (volatile long i = 0; i < n; i = i + 1) {}
    return n == 42 ? 0 : 1;
}
"""
HOARDS = """
#include <iostream>
#include <vector>
int main() {
    long n; std::cin >> n;
    std::vector<char> hoard(n, 1);
    return hoard.size() == 42 ? 0 : 1;
}
"""


@pytest.mark.parametrize(
    ("program", "hostile"),
    [(CRASHES, "print(-1)"), (SPINS, "print(10**18)"), (HOARDS, "print(10**12)")],
    ids=["crash", "time", "memory"],
)
def test_an_output_that_breaks_a_sound_checker_program_is_wrong(bench, program, hostile):
    assert bench.judge(checked("print(42)", program)).verdict is Verdict.OK
    before = bench.service.judge.num_helper_failures
    result = bench.judge(checked(hostile, program))
    assert result.verdict is Verdict.WRONG_ANSWER
    assert "checker program failed" in result.detail
    assert bench.service.judge.num_helper_failures == before + 1


def test_a_checker_program_has_more_than_the_submission():
    limits = Limits(cpu_s=4, memory_mib=300)
    ours = program_limits(Profile.PYTHON, limits, under_pressure=False)
    theirs = helper_limits(Profile.PYTHON, limits)
    assert theirs.cpu_ns >= 2 * ours.cpu_ns
    assert theirs.memory_bytes >= 3 * ours.memory_bytes


def test_a_checker_program_is_tried_once_for_all_submissions_of_a_problem(bench, monkeypatch):
    tried = []

    async def record(*parts):
        tried.append(parts)
        return await fault_of(*parts)

    monkeypatch.setattr("verifier_sandbox.judge.judge.fault_of", record)
    program = CRASHES + "// once"
    results = bench.judge_all(checked(f"print({i})", program) for i in range(40, 44))
    assert [result.verdict for result in results].count(Verdict.OK) == 1
    assert len(tried) == 1
    bench.judge(checked("print(42)", program, problem_id="another"))
    assert len(tried) == 2


GUESS = """
import sys
secret = int(open(4).read())
for _ in range(10):
    guess = int(input())
    print("=" if guess == secret else "<" if secret < guess else ">", flush=True)
    if guess == secret:
        sys.exit(0)
sys.exit(1)
"""
BISECT_PY = """
low, high = 0, 1000
while True:
    guess = (low + high) // 2
    print(guess, flush=True)
    answer = input()
    if answer == "=": break
    if answer == "<": high = guess
    else: low = guess + 1
"""
# input() flushes, reading the stream does not.
NO_FLUSH = "import sys\nprint(500)\nsys.stdin.readline()"
BISECT_CPP = """
#include <iostream>
#include <string>
int main() {
    for (int low = 0, high = 1000;;) {
        int guess = (low + high) / 2; std::cout << guess << std::endl;
        std::string answer; if (!(std::cin >> answer) || answer == "=") return 0;
        if (answer == "<") high = guess; else low = guess + 1;
    }
}
"""
SPY = """
import os, sys
for pid in range(os.getpid() - 20, os.getpid() + 20):
    if pid != os.getpid():
        try: print(int(open(f"/proc/{pid}/fd/4").read()), flush=True); break
        except OSError: pass
else:
    print(5000, flush=True)
    while sys.stdin.readline(): print(5000, flush=True)
"""


@pytest.mark.parametrize(
    ("language", "source", "verdict"),
    [
        ("python", BISECT_PY, Verdict.OK),
        ("cpp", BISECT_CPP, Verdict.OK),
        (
            "python",
            "import sys\nfor i in range(10): print(i, flush=True) or sys.stdin.readline()",
            Verdict.WRONG_ANSWER,
        ),
        ("python", "1/0", Verdict.RUNTIME_ERROR),
        ("python", NO_FLUSH, Verdict.TIME_LIMIT),
        ("python", "while True: pass", Verdict.TIME_LIMIT),
        ("python", SPY, Verdict.WRONG_ANSWER),
    ],
    ids=["bisect", "bisect-cpp", "out-of-guesses", "crash", "no-flush", "spin", "spy"],
)
def test_interactive_problem(bench, language, source, verdict):
    checker = Checker(kind="interactive", program=Program(language="python", source=GUESS))
    limits = Limits(cpu_s=0.5)
    result = bench.judge(
        request(source, [("", "617")], language=language, checker=checker, limits=limits)
    )
    assert result.verdict is verdict, result.detail


def stop_zygote_of_pair(bench) -> int:
    """Its pid, once both programs of a pair run below it: it learns of no end before it goes on."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for slot in bench.service.pool._slots:
            for zygote, _ in children(slot.launcher.pid):
                if len(children(zygote)) == 2:
                    os.kill(zygote, signal.SIGSTOP)
                    return zygote
    raise AssertionError("no pair was started")


def test_a_crash_is_told_from_a_rejection_however_late_the_ends_are_seen(bench):
    checker = Checker(kind="interactive", program=Program(language="python", source=GUESS))
    bench.judge(request(BISECT_PY, [("", "617")], checker=checker))  # the interactor's trial
    crash = request("import time\ntime.sleep(1)\n1/0", [("", "617")], checker=checker)

    async def judge_with_a_late_zygote():
        judging = asyncio.create_task(bench.service.judge.judge(crash))
        zygote = await asyncio.to_thread(stop_zygote_of_pair, bench)
        try:
            await asyncio.sleep(2)  # both end, if they can
        finally:
            os.kill(zygote, signal.SIGCONT)
        return await judging

    result = bench.await_(judge_with_a_late_zygote())
    assert result.verdict is Verdict.RUNTIME_ERROR, result.detail


GUESS_CPP = """
#include <cstdio>
#include <iostream>
int main() {
    long secret; if (fscanf(fdopen(4, "r"), "%ld", &secret) != 1) return 2;
    for (int i = 0; i < 40; i++) {
        long guess; if (!(std::cin >> guess)) return 1;
        std::cout << (guess == secret ? "=" : secret < guess ? "<" : ">") << std::endl;
        if (guess == secret) return 0;
    }
    return 1;
}
"""
CLOSES_INPUT = "import os\nos.close(0)\nfor i in range(30): print(i, flush=True)"
# Gone before the interactor says that it was right.
RIGHT_AND_GONE = "import os\nos.write(1, b'617\\n')\nos._exit(0)"
# No number ends: what reads one reads for ever.
NO_END = "import os\ntry:\n    while True: os.write(1, b'1' * 65536)\nexcept OSError: pass"


@pytest.mark.parametrize("language", ["python", "cpp"])
@pytest.mark.parametrize(
    ("source", "verdicts"),
    [
        (BISECT_PY, {Verdict.OK}),
        ("pass", {Verdict.WRONG_ANSWER}),
        ("print(5, flush=True)", {Verdict.WRONG_ANSWER}),
        (CLOSES_INPUT, {Verdict.WRONG_ANSWER}),
        (RIGHT_AND_GONE, {Verdict.OK}),
        (NO_END, {Verdict.OUTPUT_LIMIT, Verdict.TIME_LIMIT}),
    ],
    ids=["bisect", "says-nothing", "leaves", "closes-input", "right-and-gone", "no-end"],
)
def test_no_submission_can_break_its_interactor(bench, language, source, verdicts):
    if (language, source) == ("python", RIGHT_AND_GONE):
        pytest.skip("a Python interactor sees the broken pipe, and rejects")
    program = Program(language=language, source=GUESS_CPP if language == "cpp" else GUESS)
    checker = Checker(kind="interactive", program=program)
    result = bench.judge(request(source, [("", "617")], checker=checker, limits=Limits(cpu_s=0.5)))
    assert result.verdict in verdicts, result.detail


def test_an_interactor_that_cannot_bear_silence_judges_nobody(bench):
    program = Program(language="cpp", source=GUESS_CPP.replace("return 1;", "return 3;"))
    checker = Checker(kind="interactive", program=program)
    for source in ("pass", BISECT_PY):
        result = bench.judge(request(source, [("", "617")], checker=checker))
        assert result.verdict is Verdict.INFRASTRUCTURE
        assert "interactor failed: EXITED 3, tried on a silent submission" in result.detail
