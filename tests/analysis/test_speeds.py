"""Speed curves of a generator, and the rates that the simulation takes from them."""

from __future__ import annotations

import random

import pytest

from megatron_magistral.analysis.speeds import SpeedCurve, mean_context, sequence_rates

CURVE = SpeedCurve(((1, 100.0), (4, 200.0), (8, 240.0)))


def test_a_curve_is_read_as_it_is_written():
    assert SpeedCurve.parse(str(CURVE)) == CURVE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "CONCURRENCY:TOKENS_PER_S"),
        ("1:2:3", "CONCURRENCY:TOKENS_PER_S"),
        ("4:100,4:200", "concurrency 4 must be more than 4"),
        ("1:0", "more than 0"),
        ("1:inf", "more than 0"),
    ],
)
def test_what_is_no_curve_is_an_error_that_says_why(text, words):
    with pytest.raises(ValueError, match=words):
        SpeedCurve.parse(text)


@pytest.mark.parametrize(
    ("concurrency", "tokens_per_s"),
    [(0.5, 50.0), (1, 100.0), (2.5, 150.0), (8, 240.0), (50, 240.0)],
)
def test_a_curve_is_linear_between_its_points_and_flat_beyond_them(concurrency, tokens_per_s):
    assert CURVE.tokens_per_s(concurrency) == pytest.approx(tokens_per_s)


def test_rates_are_those_of_equally_loaded_generators():
    rates = sequence_rates(CURVE, num_replicas=2, most_per_replica=8, n_async=12)
    assert len(rates) == 13
    assert rates[1] == rates[2] == pytest.approx(100.0)  # alone on one generator each
    assert rates[8] == pytest.approx(200.0 / 4)
    assert 12 * rates[12] == pytest.approx(2 * 220.0)


def test_no_more_run_at_once_than_caches_hold():
    assert len(sequence_rates(CURVE, 2, most_per_replica=3, n_async=100)) == 2 * 3 + 1


def test_what_runs_has_more_behind_it_than_what_is_admitted():
    assert mean_context([10.0] * 5, prompt_tokens=2.0) == pytest.approx(2.0 + 5.0)
    heavy = [random.Random(i).paretovariate(2.5) for i in range(5000)]
    assert mean_context(heavy, 0.0) > sum(heavy) / len(heavy) / 2
