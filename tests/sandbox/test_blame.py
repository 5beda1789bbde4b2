"""What a submission does is never blamed on the machine: it cannot choose to go unjudged."""

import pytest

from tests.sandbox.conftest import request
from verifier_sandbox.protocol import Checker, Limits, Program, Verdict

pytestmark = pytest.mark.sandbox

INTERPRETER = 'asm(".section .interp,\\"a\\"\\n.string \\"{}\\"\\n.text");\nint main() {{}}'


@pytest.mark.parametrize("path", ["/lib64/ld-linux-x86-64.so.2", "/nonexistent", "/", "/dev/null"])
def test_a_binary_that_cannot_be_executed_is_a_runtime_error(bench, path):
    before = bench.service.pool.num_restarts
    result = bench.judge(request(INTERPRETER.format(path), [("", "")], language="cpp"))
    assert (result.verdict, result.num_retries) == (Verdict.RUNTIME_ERROR, 0)
    assert "exec_failed" in result.detail
    assert bench.service.pool.num_restarts == before


COUNTING_INTERACTOR = """
import sys, threading
threads = [threading.Thread(target=int) for _ in range(20)]
for thread in threads: thread.start()
sys.exit(0 if sys.stdin.readline() == "hello\\n" else 1)
"""
# Fills the quota of the user id that it shares with its interactor, at once and for a while.
CROWD_CPP = """
#include <cstdio>
#include <pthread.h>
#include <unistd.h>
void* nap(void*) { usleep(300000); return 0; }
int main() {
    pthread_t t;
    for (int i = 0; i < 120; i++) pthread_create(&t, 0, nap, 0);
    puts("hello");
    fflush(stdout);
    usleep(300000);
}
"""


def test_a_submission_cannot_crowd_out_its_interactor(bench):
    program = Program(language="python", source=COUNTING_INTERACTOR)
    checker = Checker(kind="interactive", program=program)
    result = bench.judge(request(CROWD_CPP, [("", "")], language="cpp", checker=checker))
    assert (result.verdict, result.num_retries) == (Verdict.OK, 0), result.detail


RUDE_INTERACTOR = """
import sys
right = sys.stdin.readline() == "hello\\n"
while sys.stdin.readline(): pass
print("you may go")
sys.exit(0 if right else 1)
"""


@pytest.mark.parametrize(
    ("word", "verdict"), [("hello", Verdict.OK), ("bye", Verdict.WRONG_ANSWER)]
)
def test_an_interactor_may_speak_to_a_submission_that_has_left(bench, word, verdict):
    program = Program(language="python", source=RUDE_INTERACTOR)
    checker = Checker(kind="interactive", program=program)
    result = bench.judge(request(f"print('{word}')", [("", "")], checker=checker))
    assert result.verdict is verdict, result.detail


def test_a_program_that_cannot_be_executed_ends_its_interaction(bench):
    program = Program(language="python", source="import sys\nsys.stdin.readline()")
    checker = Checker(kind="interactive", program=program)
    source = INTERPRETER.format("/nonexistent")
    result = bench.judge(request(source, [("", "")], language="cpp", checker=checker))
    assert (result.verdict, result.num_retries) == (Verdict.RUNTIME_ERROR, 0), result.detail


def test_waiting_for_cores_in_the_past_is_no_leave_to_sleep(bench):
    # A hundred waits add up to more than the wall-clock limit, at which the machine is blamed.
    source = """
#include <ctime>
#include <thread>
#include <unistd.h>
int main() {
    for (int i = 0; i < 100; i++)
        std::thread([] { while (clock() < CLOCKS_PER_SEC * 2 / 5) {} for (;;) pause(); }).detach();
    for (;;) pause();
}
"""
    result = bench.judge(request(source, language="cpp", limits=Limits(cpu_s=0.5)))
    assert (result.verdict, result.num_retries) == (Verdict.TIME_LIMIT, 0), result.detail
