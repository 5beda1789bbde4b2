import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magistral.algorithm.entropy import (
    EntropyControl,
    EntropyController,
    EntropySettings,
)


def settings(control: EntropyControl = EntropyControl.ACT, **changes: Any) -> EntropySettings:
    return EntropySettings(control, **{"smoothing": 0.0, "target": 1.0, **changes})


def after(controller: EntropyController, *entropies: float) -> EntropyController:
    for entropy in entropies:
        controller = controller.observe(entropy)
    return controller


def test_entropy_that_falls_below_the_band_raises_eps_high_by_a_step() -> None:
    controller = after(EntropyController.start(settings(), 0.27), 0.85)
    assert controller.eps_high == pytest.approx(0.272)


def test_entropy_above_the_band_lowers_it() -> None:
    controller = after(EntropyController.start(settings(), 0.27), 1.15)
    assert controller.eps_high == pytest.approx(0.268)


def test_inside_the_band_nothing_changes() -> None:
    controller = after(EntropyController.start(settings(), 0.27), 0.91, 1.09, 1.0)
    assert controller.eps_high == 0.27


@given(st.lists(st.floats(0, 10), max_size=60))
def test_whatever_is_observed_eps_high_stays_within_its_bounds(entropies: list[float]) -> None:
    controller = EntropyController.start(settings(), 0.27)
    for entropy in entropies:
        controller = controller.observe(entropy)
        assert 0.26 <= controller.eps_high <= 0.28


def test_without_a_target_the_mean_of_the_first_steps_is_kept() -> None:
    start = EntropyController.start(EntropySettings(EntropyControl.ACT, warmup_steps=3), 0.27)
    controller = after(start, 0.4, 0.5, 0.9)
    assert controller.target == pytest.approx(0.6)
    assert controller.eps_high == 0.27  # nothing is changed before the target is known


def test_one_outlier_is_smoothed_away() -> None:
    start = EntropyController.start(settings(smoothing=0.9), 0.27)
    assert after(start, 1.0, 1.0, 0.5).eps_high == 0.27


@pytest.mark.parametrize("target", [1.0, None])
def test_a_step_whose_entropy_is_not_a_number_leaves_no_trace(target: float | None) -> None:
    start = EntropyController.start(settings(target=target, warmup_steps=2, smoothing=0.5), 0.27)
    seen = (1.0, 1.0, 0.5, 0.5)
    disturbed = (math.nan, 1.0, 1.0, math.inf, 0.5, math.nan, 0.5)
    assert after(start, *disturbed) == after(start, *seen)
    assert after(start, *seen).eps_high > 0.27


def test_only_act_changes_what_is_trained_with() -> None:
    for control in EntropyControl:
        controller = after(EntropyController.start(settings(control), 0.27), 0.5)
        used = controller.used(configured=0.27)
        assert (used != 0.27) == (control is EntropyControl.ACT)


def test_suggestions_are_shown_and_off_shows_nothing() -> None:
    suggest = after(EntropyController.start(settings(EntropyControl.SUGGEST), 0.27), 0.5)
    assert suggest.metrics(0.27) == {
        "eps_high": 0.27,
        "eps_high_suggested": pytest.approx(0.272),
        "entropy_target": 1.0,
    }
    off = EntropyController.start(settings(EntropyControl.OFF), 0.27)
    assert off.metrics(0.27) == {}
