from enum import StrEnum

import pytest

from megatron_magistral.rollout.clocks import StateClock, WaitClock


class Light(StrEnum):
    RED = "red"
    GREEN = "green"


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_shares_are_of_the_time_in_each_state_and_add_up_to_one() -> None:
    time = Time()
    clock = StateClock(Light.RED, time)
    time.now_s = 3.0
    clock.enter(Light.GREEN)
    time.now_s = 4.0
    assert clock.drain() == {"red": 0.75, "green": 0.25}


def test_a_state_that_goes_on_is_counted_in_both_readings() -> None:
    time = Time()
    clock = StateClock(Light.RED, time)
    time.now_s = 2.0
    clock.drain()
    time.now_s = 6.0
    assert clock.drain() == {"red": 1.0, "green": 0.0}


def test_entering_the_state_it_is_in_changes_nothing() -> None:
    time = Time()
    clock = StateClock(Light.GREEN, time)
    time.now_s = 1.0
    clock.enter(Light.GREEN)
    time.now_s = 2.0
    assert clock.drain()["green"] == 1.0


def test_no_time_has_no_shares() -> None:
    assert StateClock(Light.RED, Time()).drain() == {"red": 0.0, "green": 0.0}


def test_waits_have_a_mean_and_a_maximum_and_are_forgotten() -> None:
    clock = WaitClock()
    clock.add(1.0)
    clock.add(4.0)
    assert clock.drain("grading") == {
        "grading_s_mean": pytest.approx(2.5),
        "grading_s_max": 4.0,
    }
    assert clock.drain("grading") == {}
