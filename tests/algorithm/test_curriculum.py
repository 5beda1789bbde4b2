"""A stage ends by the first rule that holds, on its own steps, with the numbers that decided."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_magistral.algorithm.curriculum import STAY, Rule, Rules, StepTally, decide


def tally(step, reward=0.5, near=0, dropped=0, completions=10, groups=10):
    return StepTally(step, completions, reward * completions, near, groups, dropped)


def tallies(rewards):
    return [tally(step, reward) for step, reward in enumerate(rewards)]


def test_without_a_rule_a_stage_never_ends():
    assert decide(tallies([0.5] * 1000), Rules()) == STAY


def test_a_reward_that_no_longer_grows_ends_the_stage_and_one_that_grows_does_not():
    rules = Rules(window=3, min_reward_gain=0.01)
    assert decide(tallies([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), rules) == STAY
    decision = decide(tallies([0.5, 0.5, 0.5, 0.5, 0.5, 0.515]), rules)
    assert decision.rule is Rule.REWARD_PLATEAU
    assert decision.reason == (
        "mean reward 0.5000 in steps 0 to 2 and 0.5050 in steps 3 to 5: grew by 0.0050, less "
        "than 0.01"
    )


def test_a_plateau_needs_two_whole_windows():
    assert decide(tallies([0.5] * 5), Rules(window=3, min_reward_gain=0.01)) == STAY


def test_completions_near_l_max_end_the_stage():
    rules = Rules(window=2, max_near_l_max=0.25)
    steps = [tally(0, near=9), tally(1, near=2), tally(2, near=3)]
    assert decide(steps, rules) == STAY  # 5 of 20, and the first is outside the window
    decision = decide([*steps[:2], tally(2, near=4)], rules)
    assert decision.rule is Rule.NEAR_L_MAX
    assert "6 of 20 completions" in decision.reason
    assert "steps 1 to 2: 0.3000, more than 0.25" in decision.reason


def test_dropped_groups_end_the_stage():
    decision = decide([tally(7, dropped=6)], Rules(window=1, max_dropped_groups=0.5))
    assert decision.rule is Rule.DROPPED_GROUPS
    assert "6 of 10 groups" in decision.reason
    assert "in step 7: 0.6000, more than 0.5" in decision.reason


def test_a_stage_ends_after_the_steps_it_was_given():
    rules = Rules(max_steps=4)
    assert decide(tallies([0.5] * 3), rules) == STAY
    assert decide(tallies([0.5] * 4), rules).rule is Rule.STEP


def test_no_rule_holds_before_min_steps():
    rules = Rules(min_steps=3, window=1, max_steps=1, max_dropped_groups=0.0, min_reward_gain=1.0)
    steps = [tally(step, dropped=10) for step in range(3)]
    assert decide(steps[:2], rules) == STAY
    assert decide(steps, rules).rule is Rule.REWARD_PLATEAU


def test_steps_in_which_nothing_finished_decide_nothing():
    rules = Rules(window=1, min_reward_gain=0.01, max_near_l_max=0.0, max_dropped_groups=0.0)
    empty = [tally(step, completions=0, groups=0) for step in range(4)]
    assert decide(empty, rules) == STAY


def test_a_large_step_weighs_more_than_a_small_one():
    rules = Rules(window=2, max_near_l_max=0.5)
    assert decide([tally(0, near=1, completions=1), tally(1, near=1, completions=9)], rules) == STAY


@given(
    st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1)), min_size=1, max_size=30),
    st.integers(1, 5),
    st.integers(0, 40),
)
def test_only_the_last_two_windows_have_a_say(values, window, num_earlier):
    rules = Rules(window=window, min_reward_gain=0.05, max_near_l_max=0.3, max_dropped_groups=0.3)
    steps = [tally(i, reward, near, near) for i, (near, reward) in enumerate(values)]
    recent = steps[-2 * window :]
    earlier = [tally(-1, reward=9.0, near=10, dropped=10)] * num_earlier
    if len(recent) == 2 * window:
        assert decide([*earlier, *recent], rules) == decide(recent, rules)
