from collections import Counter

import pytest

from megatron_magistral.algorithm.permutation import preset_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 16])
@pytest.mark.parametrize("step", [0, 1, 1000])
def test_every_rank_gets_the_same_number(num_ranks, step):
    counts = Counter(preset_ranks(step, 64, num_ranks, seed=7))
    assert counts == dict.fromkeys(range(num_ranks), 64 // num_ranks)


def test_the_same_step_and_seed_give_the_same_ranks_in_every_process():
    assert preset_ranks(3, 8, 2, seed=1) == (1, 0, 0, 1, 1, 1, 0, 0)


def test_steps_and_seeds_differ():
    permutations = {preset_ranks(step, 64, 4, seed) for step in range(5) for seed in range(5)}
    assert len(permutations) == 25


def test_over_many_steps_every_place_visits_every_rank_equally_often():
    num_steps, num_ranks = 4000, 4
    counts = Counter(
        place_and_rank
        for step in range(num_steps)
        for place_and_rank in enumerate(preset_ranks(step, 8, num_ranks, seed=0))
    )
    expected = num_steps / num_ranks
    tolerance = 5 * (num_steps * 0.25 * 0.75) ** 0.5  # five standard deviations
    assert all(abs(count - expected) < tolerance for count in counts.values())
    assert len(counts) == 8 * num_ranks


@pytest.mark.parametrize(("num_sequences", "num_ranks"), [(10, 4), (3, 0)])
def test_places_that_cannot_be_dealt_evenly_are_an_error(num_sequences, num_ranks):
    with pytest.raises(ValueError, match=f"{num_sequences} sequences.*{num_ranks} data-parallel"):
        preset_ranks(0, num_sequences, num_ranks, seed=0)
