from collections import Counter

import pytest

from megatron_magistral.algorithm.advantage import minibatch_sequences
from megatron_magistral.algorithm.batch import make_batch
from megatron_magistral.algorithm.permutation import preset_ranks
from megatron_magistral.algorithm.settings import (
    AlgorithmSettings,
    NormaliseAdvantage,
    NormaliseLoss,
)
from tests.algorithm.groups import group

GROUPS = [group([1.0, 0.1 * i, 0.0, 0.0], [1, 2, 3, 1 + i], ordinal=10 + i) for i in range(4)]


def test_minibatches_are_whole_groups_in_order_each_with_its_own_denominators():
    settings = AlgorithmSettings(num_minibatches=2)
    batch = make_batch(5, GROUPS, settings, num_ranks=2, seed=0)
    assert [m.sequences for m in batch.minibatches] == [
        minibatch_sequences(GROUPS[:2]),
        minibatch_sequences(GROUPS[2:]),
    ]
    assert (batch.step, batch.ordinals) == (5, (10, 11, 12, 13))


def test_switches_reach_the_sequences():
    settings = AlgorithmSettings(
        normalise_advantage=NormaliseAdvantage.NONE, normalise_loss=NormaliseLoss.TOKEN
    )
    batch = make_batch(0, GROUPS, settings, num_ranks=1, seed=0)
    assert batch.minibatches[0].sequences == minibatch_sequences(
        GROUPS,
        normalise_advantage=NormaliseAdvantage.NONE,
        normalise_loss=NormaliseLoss.TOKEN,
    )


def test_ranks_depend_on_the_optimizer_step_and_not_on_what_arrived():
    settings = AlgorithmSettings(num_minibatches=2)
    batch = make_batch(3, GROUPS, settings, num_ranks=4, seed=9)
    reordered = make_batch(3, GROUPS[::-1], settings, num_ranks=4, seed=9)
    ranks = [minibatch.ranks for minibatch in batch.minibatches]
    assert ranks == [preset_ranks(6, 8, 4, seed=9), preset_ranks(7, 8, 4, seed=9)]
    assert ranks == [minibatch.ranks for minibatch in reordered.minibatches]
    assert all(set(Counter(r).values()) == {2} for r in ranks)


@pytest.mark.parametrize(
    ("groups", "num_minibatches", "message"),
    [
        (GROUPS[:3], 2, "3 groups in 2 minibatches"),
        ([], 1, "0 groups in 1 minibatches"),
        ([GROUPS[0], group([1.0, 0.0])], 1, r"groups of \[2, 4\] members"),
    ],
)
def test_groups_that_cannot_be_cut_evenly_are_an_error(groups, num_minibatches, message):
    settings = AlgorithmSettings(num_minibatches=num_minibatches)
    with pytest.raises(ValueError, match=message):
        make_batch(0, groups, settings, num_ranks=1, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eps_low": 1.0}, "eps_low = 1.0"),
        ({"eps_high": 0.0}, "eps_high = 0.0"),
        ({"num_minibatches": 0}, "num_minibatches = 0"),
        ({"entropy_coef": -0.1}, "entropy_coef = -0.1"),
        ({"kl_coef": -0.1}, "kl_coef = -0.1"),
        ({"ema_decay": 1.0}, "ema_decay = 1.0"),
        ({"tis_cap": 2.0}, "tis_cap = 2.0.*recompute_old_logprobs"),
        ({"tis_cap": 0.0, "recompute_old_logprobs": True}, "tis_cap = 0.0"),
    ],
)
def test_settings_out_of_range_are_an_error_that_names_the_key(changes, message):
    with pytest.raises(ValueError, match=message):
        AlgorithmSettings(**changes)
