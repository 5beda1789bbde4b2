"""Shapes: R trained rows."""

import math

import torch

from megatron_magistral.algorithm.off_policy import (
    AGE_BUCKETS,
    gap_means,
    gap_sums,
    token_ages,
    without_gaps,
)
from megatron_magistral.types import Span


def test_tokens_are_counted_by_the_age_of_the_span_that_sampled_them() -> None:
    first = (Span(3, 0, 10), Span(5, 10, 14))
    second = (Span(5, 0, 6),)
    assert token_ages([first, second], version=5) == {2: 10, 0: 10}


def test_the_gap_is_the_mean_of_each_age_alone() -> None:
    logprobs_R = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    behaviour_R = torch.tensor([-1.5, -2.0, -1.0, -8.0])
    ages_R = torch.tensor([0, 0, 2, 9])
    trained_R = torch.ones(4, dtype=torch.bool)
    means = gap_means(
        {k: float(v) for k, v in gap_sums(logprobs_R, behaviour_R, ages_R, trained_R).items()}
    )
    assert means["log_ratio_abs_age_0"] == 0.25
    assert means["log_ratio_abs_age_2"] == 2.0
    assert means["log_ratio_abs_age_4_or_more"] == 4.0
    assert "log_ratio_abs_age_1" not in means  # there was no such token: no number is made up
    assert means["token_share_age_0"] == 0.5
    assert math.isclose(sum(means[f"token_share_age_{b}"] for b in AGE_BUCKETS), 1.0)


def test_rows_that_are_not_trained_do_not_count_whatever_they_hold() -> None:
    logprobs_R = torch.tensor([-1.0, math.nan])
    behaviour_R = torch.tensor([-2.0, -math.inf])
    trained_R = torch.tensor([True, False])
    sums = gap_sums(logprobs_R, behaviour_R, torch.tensor([1, 1]), trained_R)
    assert float(sums["log_ratio_abs_age_1"]) == 1.0
    assert float(sums["tokens_age_1"]) == 1.0


def test_sums_of_parts_are_the_sums_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs_R, behaviour_R = torch.randn(2, 30, generator=generator)
    ages_R = torch.randint(0, 7, (30,), generator=generator)
    trained_R = torch.rand(30, generator=generator) > 0.3
    whole = gap_sums(logprobs_R, behaviour_R, ages_R, trained_R)
    parts = [
        gap_sums(logprobs_R[cut], behaviour_R[cut], ages_R[cut], trained_R[cut])
        for cut in (slice(0, 11), slice(11, 30))
    ]
    for name, value in whole.items():
        torch.testing.assert_close(value, parts[0][name] + parts[1][name])


def test_other_sums_are_left_as_they_are() -> None:
    sums = {"loss": 1.0, "tokens_age_0": 3.0, "log_ratio_abs_age_0": 2.0}
    assert without_gaps(sums) == {"loss": 1.0}
