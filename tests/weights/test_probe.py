"""The alarm on growing differences between engine and trainer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magistral.weights.probe import AlarmSettings, is_drifting, probe_gap

SETTINGS = AlarmSettings(factor=4.0, patience=3, window=16, min_history=8, floor=1e-5)
USUAL = [0.01, 0.012, 0.009, 0.011] * 5


def test_a_gap_is_mean_and_maximum_of_absolute_differences() -> None:
    gap = probe_gap([-1.0, -2.0, -3.0], [-1.5, -2.0, -2.0])
    assert (gap.mean, gap.max) == (0.5, 1.0)


def test_scorings_of_different_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError):
        probe_gap([-1.0], [-1.0, -2.0])


def test_a_gap_that_stays_high_is_an_alarm_after_patience_updates() -> None:
    assert [is_drifting(USUAL + [0.1] * n, SETTINGS) for n in range(5)] == [
        False,
        False,
        False,
        True,
        True,
    ]


def test_outliers_are_no_alarm() -> None:
    for position in range(len(USUAL)):
        gaps = [*USUAL[:position], 1e9, *USUAL[position:]]
        assert not any(is_drifting(gaps[:n], SETTINGS) for n in range(len(gaps) + 1))


def test_a_gap_that_is_not_a_number_is_high() -> None:
    assert is_drifting(USUAL + [math.nan] * 3, SETTINGS)


def test_rounding_is_no_alarm() -> None:
    assert not is_drifting([1e-9] * 20 + [3e-6] * 3, SETTINGS)
    assert is_drifting([1e-9] * 20 + [3e-4] * 3, SETTINGS)


@given(st.lists(st.floats(0.005, 0.019), max_size=80))
def test_noise_within_the_factor_is_never_an_alarm(gaps: list[float]) -> None:
    assert not is_drifting(gaps, SETTINGS)


def test_there_is_no_verdict_before_there_is_a_history() -> None:
    assert not is_drifting([0.01] * 7 + [1.0] * 3, SETTINGS)
    assert is_drifting([0.01] * 8 + [1.0] * 3, SETTINGS)
