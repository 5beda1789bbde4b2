import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magistral.algorithm.advantage import Diversity, diversity, minibatch_sequences
from megatron_magistral.algorithm.settings import NormaliseAdvantage, NormaliseLoss
from tests.algorithm.groups import group, member

REWARDS = st.sampled_from([0.0, 0.1, 0.2, 0.05, 1.0, 1.1, None])
LENGTHS = st.integers(0, 9)
GROUPS = st.lists(
    st.lists(st.tuples(REWARDS, LENGTHS), min_size=1, max_size=6), min_size=1, max_size=5
).map(
    lambda groups: [
        group([reward for reward, _ in members], [length for _, length in members])
        for members in groups
    ]
)


def advantages(groups, mode=NormaliseAdvantage.MINIBATCH):
    return [s.advantage for s in minibatch_sequences(groups, normalise_advantage=mode)]


def weights(groups, mode=NormaliseLoss.GROUP):
    return [s.weight for s in minibatch_sequences(groups, normalise_loss=mode)]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.1], Diversity.DIVERSE),
        ([1.0, 1.0, 1.0], Diversity.UNIFORM),
        ([1.0], Diversity.UNIFORM),
        ([1.0, 1.0 - 2**-53], Diversity.DIVERSE),
        ([None, 1.0, 1.0], Diversity.UNIFORM),
        ([None, 1.0, 0.1], Diversity.DIVERSE),
        ([None, None], Diversity.UNGRADED),
        ([], Diversity.UNGRADED),
    ],
)
def test_diversity_is_exact_inequality_among_graded_members(rewards, expected):
    assert diversity([member(reward) for reward in rewards]) is expected


def test_minibatch_advantages_are_centred_per_group_then_divided_by_the_minibatch_std():
    groups = [group([1.0, 0.0]), group([1.0, 0.0, 0.0, 0.0])]
    centred = [0.5, -0.5, 0.75, -0.25, -0.25, -0.25]
    std = statistics.pstdev(centred)
    assert advantages(groups) == pytest.approx([a / std for a in centred])


def test_group_advantages_are_divided_by_the_std_of_their_own_group():
    groups = [group([1.0, 0.0]), group([1.0, 0.0, 0.0, 0.0])]
    std = statistics.pstdev([1.0, 0.0, 0.0, 0.0])
    expected = [1.0, -1.0, 0.75 / std, -0.25 / std, -0.25 / std, -0.25 / std]
    assert advantages(groups, NormaliseAdvantage.GROUP) == pytest.approx(expected)


def test_advantages_without_normalisation_are_only_centred():
    groups = [group([1.0, 0.0, 0.2])]
    assert advantages(groups, NormaliseAdvantage.NONE) == pytest.approx([0.6, -0.4, -0.2])


@pytest.mark.parametrize("mode", NormaliseAdvantage)
def test_a_uniform_group_gets_exactly_zero_although_its_mean_rounds(mode):
    assert math.fsum([0.1] * 3) / 3 != 0.1  # noise that a division by its own std would blow up
    assert advantages([group([0.1] * 3)], mode) == [0.0] * 3
    assert advantages([group([0.1] * 3), group([1.0, 0.0])], mode)[:3] == [0.0] * 3


@pytest.mark.parametrize("mode", NormaliseAdvantage)
def test_masked_members_change_no_advantage_of_the_others(mode):
    without = [group([1.0, 0.1, 0.1]), group([0.0, 1.1])]
    masked = [group([1.0, None, 0.1, 0.1]), group([None, 0.0, 1.1, None])]
    values = advantages(masked, mode)
    assert [values[i] for i in (1, 4, 7)] == [0.0] * 3
    assert [values[i] for i in (0, 2, 3, 5, 6)] == advantages(without, mode)


@pytest.mark.parametrize("mode", NormaliseLoss)
def test_masked_members_change_no_weight_of_the_others(mode):
    without = [group([1.0, 0.1], [2, 5]), group([0.0, 1.1], [1, 7])]
    masked = [group([None, 1.0, 0.1], [9, 2, 5]), group([0.0, 1.1], [1, 7]), group([None], [4])]
    values = weights(masked, mode)
    assert values[0] == 0.0 and values[5] == 0.0
    assert values[1:5] == weights(without, mode)


def test_group_weights_are_one_over_groups_times_tokens_of_the_group():
    groups = [group([1.0, 0.0], [2, 6]), group([1.0, 0.0], [1, 3])]
    assert weights(groups) == [1 / 16, 1 / 16, 1 / 8, 1 / 8]


def test_token_weights_are_one_over_tokens_of_the_minibatch():
    groups = [group([1.0, 0.0], [2, 6]), group([1.0, 0.0], [1, 3])]
    assert weights(groups, NormaliseLoss.TOKEN) == [1 / 12] * 4


def test_sequence_weights_are_one_over_sequences_times_own_tokens():
    groups = [group([1.0, 0.0], [2, 6]), group([1.0, 0.0], [1, 3])]
    expected = [1 / 8, 1 / 24, 1 / 4, 1 / 12]
    assert weights(groups, NormaliseLoss.SEQUENCE) == expected


def test_an_empty_completion_votes_on_the_advantage_and_has_no_weight():
    groups = [group([1.0, 0.0, 0.0], [4, 0, 2])]
    assert advantages(groups, NormaliseAdvantage.NONE) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert weights(groups) == [1 / 6, 0.0, 1 / 6]


@given(GROUPS)
def test_minibatch_advantages_have_mean_0_and_std_1_or_are_all_0(groups):
    graded = [m.reward.status == "graded" for g in groups for m in g.members]
    votes = [a for a, is_graded in zip(advantages(groups), graded, strict=True) if is_graded]
    if any(diversity(g.members) is Diversity.DIVERSE for g in groups):
        assert statistics.fmean(votes) == pytest.approx(0.0, abs=1e-9)
        assert statistics.pstdev(votes) == pytest.approx(1.0)
    else:
        assert not any(votes)


@given(GROUPS, st.sampled_from(NormaliseLoss))
def test_token_weights_of_a_minibatch_add_up_to_one_or_nothing_is_trained(groups, mode):
    sequences = minibatch_sequences(groups, normalise_loss=mode)
    total = math.fsum(s.weight * s.num_output_tokens for s in sequences)
    expected = 1.0 if any(s.weight for s in sequences) else 0.0
    assert total == pytest.approx(expected)


@given(GROUPS, st.randoms(use_true_random=False))
def test_advantages_do_not_depend_on_the_order_of_groups(groups, random):
    order = list(range(len(groups)))
    random.shuffle(order)
    by_group = {}
    values = iter(advantages([groups[i] for i in order]))
    for i in order:
        by_group[i] = [next(values) for _ in groups[i].members]
    assert [a for i in range(len(groups)) for a in by_group[i]] == advantages(groups)


def test_a_sequence_is_prompt_then_output_with_what_the_generator_recorded():
    source = group([1.0, 0.0], [3, 4])
    first, second = minibatch_sequences([source])
    completion = source.members[1].completion
    assert second.tokens == completion.prompt_ids + completion.output_ids
    assert (second.num_prompt_tokens, second.num_output_tokens) == (2, 4)
    assert (second.logprobs, second.spans) == (completion.logprobs, completion.spans)
    assert first.num_output_tokens == 3
