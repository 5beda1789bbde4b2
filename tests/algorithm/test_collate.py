from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magistral.algorithm.collate import (
    collate,
    collation_report,
    lower_bound,
    padding_fraction,
    sequential_fill,
    unsorted_first_fit,
)

BUDGET = 32
LENGTHS = st.lists(st.integers(1, BUDGET), max_size=60)
METHODS = [collate, unsorted_first_fit, sequential_fill]


def optimum(lengths, max_tokens):
    """The least number of microbatches, by trying every assignment."""
    for count in range(len(lengths) + 1):
        for assignment in product(range(count), repeat=len(lengths)):
            loads = [0] * count
            for length, slot in zip(lengths, assignment, strict=True):
                loads[slot] += length
            if all(load <= max_tokens for load in loads):
                return count
    raise AssertionError("every sequence fits alone")


@pytest.mark.parametrize("method", METHODS)
@given(lengths=LENGTHS)
def test_every_sequence_is_in_exactly_one_microbatch(method, lengths):
    microbatches = method(lengths, BUDGET)
    assert sorted(i for microbatch in microbatches for i in microbatch) == list(range(len(lengths)))
    assert all(microbatches)


@pytest.mark.parametrize("method", METHODS)
@given(lengths=LENGTHS)
def test_no_microbatch_exceeds_the_budget(method, lengths):
    assert all(sum(lengths[i] for i in batch) <= BUDGET for batch in method(lengths, BUDGET))


@pytest.mark.parametrize("method", METHODS)
@given(lengths=LENGTHS)
def test_no_method_beats_the_lower_bound(method, lengths):
    assert len(method(lengths, BUDGET)) >= lower_bound(lengths, BUDGET)


@given(LENGTHS)
def test_no_sequence_fits_into_an_earlier_microbatch(lengths):
    microbatches = collate(lengths, BUDGET)
    loads = [sum(lengths[i] for i in batch) for batch in microbatches]
    for position, batch in enumerate(microbatches):
        shortest = min(lengths[i] for i in batch)
        assert all(load + shortest > BUDGET for load in loads[:position])


@given(LENGTHS)
def test_sequences_are_placed_in_descending_length_with_ties_in_the_given_order(lengths):
    for batch in collate(lengths, BUDGET):
        assert batch == sorted(batch, key=lambda i: (-lengths[i], i))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_at_most_eleven_ninths_of_the_optimum_plus_six_ninths(lengths):
    assert 9 * len(collate(lengths, 12)) <= 11 * optimum(lengths, 12) + 6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [0, -3, BUDGET + 1])
def test_a_length_outside_the_budget_is_an_error_that_names_it(method, length):
    with pytest.raises(ValueError, match=rf"sequence 1 has {length} tokens.*{BUDGET}"):
        method([4, length], BUDGET)


def test_a_worked_example_shows_what_each_method_does():
    lengths = [6, 5, 5, 4]
    assert collate(lengths, 10) == [[0, 3], [1, 2]]
    assert unsorted_first_fit(lengths, 10) == [[0, 3], [1, 2]]
    assert sequential_fill(lengths, 10) == [[0], [1, 2], [3]]


def test_the_report_counts_padding_against_its_baselines():
    report = collation_report([6, 5, 5, 4], 10)
    assert (report.greedy, report.sequential_fill, report.lower_bound) == (2, 3, 2)
    assert report.padding_fraction == 0.0
    assert report.saved_fraction == pytest.approx(1 / 3)


def test_padding_is_the_empty_share_of_the_slots():
    assert padding_fraction([5, 7], 2, 8) == pytest.approx(4 / 16)
    assert padding_fraction([], 0, 8) == 0.0
