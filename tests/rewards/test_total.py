import itertools

import pytest

from megatron_magistral.rewards.format import GateResult, GateStatus
from megatron_magistral.rewards.language import LanguageAgreement
from megatron_magistral.rewards.length import length_reward
from megatron_magistral.rewards.settings import RewardSettings
from megatron_magistral.rewards.total import Grade, gate_failure, total
from megatron_magistral.types import GradeStatus, Reward
from tests.rewards.problems import CODE, MATHS

SETTINGS = RewardSettings(l_max=100, l_cache=20)
PROPORTIONAL = RewardSettings(l_max=100, l_cache=20, proportional_code=True)
AGREE, DISAGREE, UNDETERMINED = LanguageAgreement


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (0, 0.0),
        (79, 0.0),
        (80, 0.0),
        (81, -0.005),
        (90, -0.05),
        (99, -0.095),
        (100, -0.1),
        (101, -0.1),
        (10**6, -0.1),
    ],
)
def test_the_length_penalty_starts_at_l_max_minus_l_cache_and_ends_at_l_max(num_tokens, expected):
    value = length_reward(num_tokens, l_max=100, l_cache=20, penalty=0.1)
    assert value == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("problem", "settings", "fraction", "language", "num_tokens", "parts", "expected"),
    [
        (MATHS, SETTINGS, 1.0, AGREE, 10, (0.1, 0.9, 0.1, 0.0), 1.1),
        (MATHS, SETTINGS, 1.0, DISAGREE, 10, (0.1, 0.9, 0.0, 0.0), 1.0),
        (MATHS, SETTINGS, 1.0, UNDETERMINED, 10, (0.1, 0.9, 0.0, 0.0), 1.0),
        (MATHS, SETTINGS, 0.0, AGREE, 10, (0.1, 0.0, 0.1, 0.0), 0.2),
        (MATHS, SETTINGS, 0.0, DISAGREE, 10, (0.1, 0.0, 0.0, 0.0), 0.1),
        (MATHS, SETTINGS, 0.0, DISAGREE, 200, (0.1, 0.0, 0.0, -0.1), 0.0),
        (MATHS, SETTINGS, 1.0, AGREE, 90, (0.1, 0.9, 0.1, -0.05), 1.05),
        (MATHS, SETTINGS, 1.0, AGREE, 100, (0.1, 0.9, 0.1, -0.1), 1.0),
        (CODE, SETTINGS, 1.0, AGREE, 10, (0.1, 0.9, 0.1, 0.0), 1.1),
        (CODE, SETTINGS, 0.95, AGREE, 10, (0.1, 0.0, 0.1, 0.0), 0.2),
        (CODE, PROPORTIONAL, 0.95, AGREE, 10, (0.1, 0.855, 0.1, 0.0), 1.055),
        (CODE, PROPORTIONAL, 1.0, DISAGREE, 10, (0.1, 0.9, 0.0, 0.0), 1.0),
        (CODE, PROPORTIONAL, 0.0, DISAGREE, 10, (0.1, 0.0, 0.0, 0.0), 0.1),
        (MATHS, PROPORTIONAL, 0.5, DISAGREE, 10, (0.1, 0.0, 0.0, 0.0), 0.1),
    ],
)
def test_the_reward_table(problem, settings, fraction, language, num_tokens, parts, expected):
    reward = total(problem, Grade(fraction), language, num_tokens, settings)
    axes = (reward.format, reward.correctness, reward.language, reward.length)
    assert axes == pytest.approx(parts, abs=1e-15)
    assert reward.total == pytest.approx(expected, abs=1e-15)
    assert reward.status is GradeStatus.GRADED
    assert reward.passed_fraction == fraction


@pytest.mark.parametrize("status", [status for status in GateStatus if status != "passed"])
def test_whatever_fails_the_gate_gets_zero_on_every_axis_and_says_why(status):
    reward = gate_failure(GateResult(status, thoughts="t", answer="a"))
    assert reward == Reward(0.0, 0.0, 0.0, 0.0, detail=status.value)
    assert type(reward.detail) is str
    assert reward.total == 0.0


def test_a_failed_verifier_masks_the_completion_instead_of_paying_zero():
    grade = Grade(0.0, GradeStatus.INFRASTRUCTURE, detail="pool: worker lost")
    reward = total(MATHS, grade, AGREE, 10, SETTINGS)
    assert (reward.status, reward.detail) == (GradeStatus.INFRASTRUCTURE, "pool: worker lost")
    assert reward.total == 0.0


def test_equal_outcomes_have_exactly_equal_totals():
    """Whether a group is dropped hangs on exact equality of totals."""
    for fraction, language in itertools.product([0.0, 1.0], LanguageAgreement):
        rewards = {
            total(MATHS, Grade(fraction), language, num_tokens, SETTINGS).total
            for num_tokens in range(81)
        }
        assert len(rewards) == 1


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_outside_0_and_1_is_an_error(fraction):
    with pytest.raises(ValueError, match="passed_fraction"):
        Grade(fraction)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"l_cache": 0}, "l_cache = 0"),
        ({"l_cache": 100}, "l_cache = 100.*l_max = 100"),
        ({"format": -0.1}, "format = -0.1"),
        ({"length_penalty": -1.0}, "length_penalty = -1.0"),
    ],
)
def test_settings_out_of_range_are_an_error_that_names_the_key(changes, message):
    with pytest.raises(ValueError, match=message):
        RewardSettings(**({"l_max": 100, "l_cache": 20} | changes))
