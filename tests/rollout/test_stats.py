import pytest

from megatron_magistral.rollout.stats import RolloutStats, padding_metrics, staleness_metrics
from megatron_magistral.types import Batch, GradeStatus, Minibatch, Span, TrainSequence
from tests.fakes import graded_of


def sequence(num_tokens: int, spans: tuple[Span, ...]) -> TrainSequence:
    return TrainSequence((0,) * num_tokens, 1, (0.0,) * (num_tokens - 1), spans, 0.0, 0.0)


def test_staleness_is_the_age_of_tokens_not_of_sequences():
    old_long = sequence(10, (Span(3, 0, 9),))
    mixed = sequence(4, (Span(4, 0, 1), Span(5, 1, 3)))
    metrics = staleness_metrics([old_long, mixed], version=5)
    assert metrics["staleness_mean"] == (2 * 9 + 1 * 1 + 0 * 2) / 12
    assert metrics["staleness_max"] == 2
    assert metrics["mixed_version_sequences"] == 0.5


def test_masked_completions_are_counted_and_left_out_of_the_rewards():
    stats = RolloutStats()
    masked = graded_of(0.0, status=GradeStatus.INFRASTRUCTURE)
    stats.add([graded_of(0.9), graded_of(0.0), masked], "taken")
    metrics = stats.drain()
    assert metrics["masked_completions"] == 1
    assert metrics["reward_mean"] == pytest.approx(0.45)


def test_padding_is_reported_with_its_baselines():
    sequences = tuple(sequence(length, ()) for length in (7, 7, 5, 5))
    batch = Batch(0, (Minibatch(sequences, (0, 0, 0, 0)),), ())
    metrics = padding_metrics(batch, max_tokens=12)
    assert metrics["padding_greedy"] == 0  # 7 + 5, 7 + 5
    assert metrics["padding_sequential_fill"] == pytest.approx(1 - 24 / 36)  # 7, 7 + 5, 5
    assert metrics["padding_unsorted_first_fit"] == 0
    assert metrics["padding_lower_bound"] == 0


def test_padding_counts_every_rank_by_itself():
    sequences = tuple(sequence(length, ()) for length in (7, 5))
    batch = Batch(0, (Minibatch(sequences, (0, 1)),), ())
    assert padding_metrics(batch, max_tokens=12)["padding_greedy"] == pytest.approx(1 - 12 / 24)
