import pytest

from megatron_magistral.rollout.stats import padding_metrics
from megatron_magistral.types import Batch, Minibatch, TrainSequence


def sequence(num_tokens: int) -> TrainSequence:
    return TrainSequence((0,) * num_tokens, 1, (0.0,) * (num_tokens - 1), (), 0.0, 0.0)


def test_padding_is_reported_with_its_baselines():
    sequences = tuple(sequence(length) for length in (7, 7, 5, 5))
    batch = Batch(0, (Minibatch(sequences, (0, 0, 0, 0)),), ())
    metrics = padding_metrics(batch, max_tokens=12)
    assert metrics["padding_greedy"] == 0  # 7 + 5, 7 + 5
    assert metrics["padding_sequential_fill"] == pytest.approx(1 - 24 / 36)  # 7, 7 + 5, 5
    assert metrics["padding_unsorted_first_fit"] == 0
    assert metrics["padding_lower_bound"] == 0


def test_padding_counts_every_rank_by_itself():
    sequences = tuple(sequence(length) for length in (7, 5))
    batch = Batch(0, (Minibatch(sequences, (0, 1)),), ())
    assert padding_metrics(batch, max_tokens=12)["padding_greedy"] == pytest.approx(1 - 12 / 24)
