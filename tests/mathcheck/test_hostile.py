import random
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.mathcheck.hostile import CODE, WRONG_FOR_SEVEN
from verifier_sandbox.mathcheck import MathVerdict, check, policy
from verifier_sandbox.mathcheck.name_tables import name_list

PIECES = name_list(
    r"\frac{ }{ } } { ( ) [ ] \sqrt \sqrt[3]{ ^{ _{ x y 1 23 4.5 ! + - * / = < \le \cup \{ \} , |",
    r"\sin \log_ \sum_{k=1}^{ \binom{ \begin{pmatrix} \end{pmatrix} & \\ \text{ \pm \infty and or",
    r"^\circ % ' : \ldots $ \pi e i \left( \right) a_1 ² ½ 或 \int 1,234 \in \mathbb{R} \boxed{",
)


@pytest.mark.parametrize("answer", WRONG_FOR_SEVEN, ids=lambda answer: answer[:24])
def test_a_hostile_answer_ends_and_is_not_correct(answer):
    assert check("7", answer).verdict is not MathVerdict.CORRECT


@pytest.mark.parametrize("answer", CODE)
@pytest.mark.parametrize("reference", ["7", "3+4", "x", r"\frac{1}{2}", "(1,2)"])
def test_code_is_never_run_and_never_correct(reference, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check(reference, answer).verdict is not MathVerdict.CORRECT
    assert list(tmp_path.iterdir()) == []


def test_random_latex_of_any_length_ends_in_a_verdict():
    generator = random.Random(2506)
    for length in (3, 30, 300, 20_000):
        for _ in range(30):
            text = "".join(generator.choices(PIECES, k=length))
            assert check("x+1", text).verdict in MathVerdict


@pytest.mark.parametrize(
    "answer",
    [
        r"x+0\ln(1+1.1^x i)",
        r"x+0\cdot(1+1.1^{x+i})^{x}",
        r"x+0(1+1.1^{x}i)^{\pi}",
        r"x+0|1+1.1^{x}i|",
    ],
)
def test_a_complex_number_with_parts_of_very_different_size_takes_little_memory(answer):
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used_pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS, (used_pages * resource.getpagesize() + (256 << 20), limits[1])
    )
    try:
        reason = check("x", answer).reason
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert "memory" not in reason


def test_a_long_list_in_another_order_is_within_the_budget():
    powers = [f"x^{{{k}}}" for k in range(policy.MAX_ITEMS)]
    reverse = ",".join(reversed(powers))
    assert check(",".join(powers), reverse).verdict is MathVerdict.CORRECT
    assert check(",".join(powers), reverse + "+1").verdict is MathVerdict.WRONG


def test_a_long_answer_is_too_big_unless_it_is_the_reference():
    long = "1+" * policy.MAX_ANSWER_CHARS + "1"
    assert check("7", long).verdict is MathVerdict.TOO_BIG
    assert check(long, long).verdict is MathVerdict.CORRECT


def test_a_tower_equals_only_itself():
    assert check("7^{7^{7^{7}}}", "7^{7^{7^{7}}}").verdict is MathVerdict.CORRECT
    assert check("7^{7^{7^{7}}}", "7^{7^{7^{8}}}").verdict is not MathVerdict.CORRECT


def test_a_check_runs_off_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(check(r"\sqrt{8}", r"2\sqrt{2}")))
    thread.start()
    thread.join(timeout=60)
    assert [result.verdict for result in results] == [MathVerdict.CORRECT]


def test_checks_in_several_threads_do_not_disturb_each_other():
    pairs = [(r"\sqrt{2}+10^{-60}", r"\sqrt{2}", MathVerdict.WRONG), ("e", "e^{1}", None)] * 8
    wrong = []

    def work(reference, prediction, expected):
        for _ in range(20):
            verdict = check(reference, prediction).verdict
            if verdict is not (expected or MathVerdict.CORRECT):
                wrong.append((reference, verdict))

    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert wrong == []


def test_timers_and_handlers_of_the_caller_stay_untouched():
    fired = []
    before = signal.signal(signal.SIGALRM, lambda *_: fired.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 300.0)
    try:
        check(r"\frac{1}{2}", "0.5")
        check("7", "9**9**9**9")
        remaining_s, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < remaining_s <= 300.0
        assert fired == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_the_precision_of_the_callers_mpmath_stays_untouched():
    import mpmath

    before = mpmath.mp.prec
    check(r"\sqrt{2}+10^{-200}", r"\sqrt{2}")
    assert mpmath.mp.prec == before
