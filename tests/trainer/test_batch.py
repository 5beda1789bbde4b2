"""Packing: which token predicts which, and what padding is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_magistral.trainer.batch import NO_VERSION, pack, pack_microbatches
from megatron_magistral.types import Span, TrainSequence
from tests.trainer.models import random_sequences

lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 8)), min_size=0, max_size=8)


@settings(deadline=None)  # times depend on the machine
@given(lengths, st.sampled_from([1, 2, 4, 8]))
def test_each_row_predicts_its_output_token(pairs: list[tuple[int, int]], multiple_of: int) -> None:
    sequences = random_sequences(pairs or [(1, 1)])
    batch = pack(sequences, multiple_of)
    outputs = [token for s in sequences for token in s.tokens[s.num_prompt_tokens :]]
    assert batch.targets_R.tolist() == outputs
    assert batch.tokens_T[batch.rows_R + 1].tolist() == outputs


@settings(deadline=None)  # times depend on the machine
@given(lengths, st.sampled_from([1, 2, 4, 8]))
def test_padding_is_a_segment_of_its_own(pairs: list[tuple[int, int]], multiple_of: int) -> None:
    sequences = random_sequences(pairs) if pairs else []
    batch = pack(sequences, multiple_of)
    assert len(batch.tokens_T) % multiple_of == 0
    assert len(batch.tokens_T) > 0
    segments = batch.cu_seqlens.diff().tolist()
    expected = [len(s.tokens) for s in sequences]
    assert segments == expected + ([batch.num_padding] if batch.num_padding else [])
    assert batch.max_seqlen == max(segments)
    assert batch.cu_seqlens[0] == 0
    assert batch.cu_seqlens[-1] == len(batch.tokens_T)
    assert batch.num_tokens == sum(expected)


def test_rows_carry_what_belongs_to_their_sequence() -> None:
    first, second = random_sequences([(2, 3), (4, 1)])
    batch = pack([first, second])
    assert batch.rows_R.tolist() == [1, 2, 3, 8]
    assert torch.equal(batch.advantages_R, torch.tensor([first.advantage] * 3 + [second.advantage]))
    assert torch.equal(batch.weights_R, torch.tensor([first.weight] * 3 + [second.weight]))
    expected = torch.tensor([*first.logprobs, *second.logprobs])
    assert torch.equal(batch.generator_logprobs_R, expected)
    assert torch.equal(batch.old_logprobs_R, expected)


def test_recomputed_log_probabilities_leave_the_generators_alone() -> None:
    batch = pack(random_sequences([(2, 3)]))
    replaced = batch.with_old_logprobs(torch.zeros(3))
    assert torch.equal(replaced.generator_logprobs_R, batch.generator_logprobs_R)
    assert not replaced.old_logprobs_R.any()


@settings(deadline=None)  # times depend on the machine
@given(lengths, st.integers(14, 40))
def test_microbatches_hold_every_sequence_once_within_the_budget(
    pairs: list[tuple[int, int]], max_tokens: int
) -> None:
    sequences = random_sequences(pairs) if pairs else []
    batches = pack_microbatches(sequences, max_tokens)
    assert len(batches) >= 1
    assert all(batch.num_tokens <= max_tokens for batch in batches)
    packed = sorted(
        tuple(part.tolist())
        for batch in batches
        for part in batch.tokens_T.split(batch.cu_seqlens.diff().tolist())[: batch.num_sequences]
    )
    assert packed == sorted(s.tokens for s in sequences)


def test_a_rank_without_sequences_gets_one_microbatch_of_padding() -> None:
    (batch,) = pack_microbatches([], 100, multiple_of=4)
    assert batch.num_padding == len(batch.tokens_T) == 4
    assert batch.num_tokens == len(batch.rows_R) == 0


def _sequence(num_prompt_tokens: int, logprobs: tuple[float, ...]) -> TrainSequence:
    return TrainSequence(
        tokens=(1, 2, 3),
        num_prompt_tokens=num_prompt_tokens,
        logprobs=logprobs,
        spans=(),
        advantage=0.0,
        weight=1.0,
    )


def test_a_supervised_trace_needs_no_log_probabilities() -> None:
    assert not pack([_sequence(1, ())]).old_logprobs_R.any()


def test_rows_carry_the_version_of_the_span_that_sampled_them() -> None:
    spans = (Span(3, 0, 1), Span(4, 1, 2))
    assert pack([replace(_sequence(1, ()), spans=spans)]).versions_R.tolist() == [3, 4]
    assert pack([_sequence(1, ())]).versions_R.tolist() == [NO_VERSION] * 2


def test_version_spans_that_do_not_cover_the_output_are_refused() -> None:
    with pytest.raises(ValueError, match="end at 1: must cover all 2 output tokens"):
        pack([replace(_sequence(1, ()), spans=(Span(3, 0, 1),))])


def test_a_sequence_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="num_prompt_tokens = 0"):
        pack([_sequence(0, (0.0, 0.0, 0.0))])


def test_a_wrong_number_of_log_probabilities_is_refused() -> None:
    with pytest.raises(ValueError, match="1 log-probabilities for 2 output tokens"):
        pack([_sequence(1, (0.0,))])


def test_a_sequence_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget of 4 tokens"):
        pack_microbatches(random_sequences([(3, 2)]), 4)
