import itertools
import math

import pytest

from megatron_magistral.evals.estimators import mean, pass_at_1, pass_at_k, standard_error


def test_pass_at_1_weighs_problems_not_samples():
    assert pass_at_1([[True, True, True, True], [False]]) == 0.5


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    samples = [True, False, False, True, False]
    for k in range(1, 6):
        subsets = list(itertools.combinations(samples, k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(5, 2, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("num_correct", "expected"), [(0, 0.0), (8, 1.0)])
def test_pass_at_k_at_the_ends(num_correct, expected):
    assert pass_at_k(8, num_correct, 3) == expected


@pytest.mark.parametrize("arguments", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_impossible_counts_are_refused(arguments):
    with pytest.raises(ValueError, match="must lie in"):
        pass_at_k(*arguments)


def test_standard_error_is_that_of_the_mean_over_problems():
    rows = [[True, False], [True, True], [False, False], [True, False]]
    # means 0.5, 1, 0, 0.5: variance 1/6, over 4 problems
    assert standard_error(rows) == pytest.approx(math.sqrt(1 / 6 / 4))


def test_the_mean_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no values"):
        mean([])
