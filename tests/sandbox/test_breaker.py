"""When a node is asked, left alone, and tried again."""

from __future__ import annotations

from verifier_sandbox.breaker import Breaker, BreakerState


def broken(at: float = 0.0) -> Breaker:
    breaker = Breaker(max_faults=3, pause_s=10.0)
    for _ in range(3):
        breaker.failed("HTTP 500", at)
    return breaker


def test_faults_in_a_row_open_it_for_a_while():
    breaker = broken(at=100.0)
    assert breaker.state(109.9) is BreakerState.OPEN
    assert not breaker.lets_through(109.9, num_in_flight=0)
    assert (breaker.num_faults, breaker.num_opened) == (3, 1)


def test_faults_with_an_answer_between_them_do_not():
    breaker = Breaker(max_faults=3, pause_s=10.0)
    for _ in range(9):
        breaker.failed("HTTP 500", 0.0)
        breaker.answered()
    assert breaker.state(0.0) is BreakerState.CLOSED
    assert breaker.num_opened == 0


def test_half_open_it_lets_one_request_through():
    breaker = broken()
    assert breaker.state(10.0) is BreakerState.HALF_OPEN
    assert breaker.lets_through(10.0, num_in_flight=0)
    assert not breaker.lets_through(10.0, num_in_flight=1)


def test_the_trial_decides():
    answered, failed = broken(), broken()
    answered.answered()
    failed.failed("HTTP 500", 10.0)
    assert answered.state(10.0) is BreakerState.CLOSED
    assert failed.state(10.0) is BreakerState.OPEN
    assert (failed.num_opened, failed.reopens_at) == (1, 20.0)


def test_after_a_single_fault_others_are_asked_first():
    breaker = Breaker(max_faults=3, pause_s=10.0)
    breaker.failed("HTTP 500", 0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    assert not breaker.lets_through(0.1, num_in_flight=0)
    assert breaker.lets_through(0.3, num_in_flight=5)


def test_a_full_node_has_no_fault():
    breaker = Breaker(max_faults=1, pause_s=10.0)
    breaker.is_full(2.0, now=0.0)
    assert not breaker.lets_through(1.0, num_in_flight=0)
    assert breaker.state(2.0) is BreakerState.CLOSED
    assert breaker.num_faults == 0
