"""What a simulated run is reduced to, on runs whose answers can be worked out by hand."""

from __future__ import annotations

import pytest

from megatron_magistral.analysis.outlook import outlook, token_ages
from megatron_magistral.analysis.pipeline_model import Mode, Settings, Speeds, in_mode
from megatron_magistral.analysis.simulate import simulate

SETTINGS = Settings(n_async=8, n_batch=8, queue_capacity=8, group_size=4)


def run(speeds: Speeds, mode: Mode = Mode.ASYNCHRONOUS, length: float = 10.0, num_steps: int = 12):
    trace = simulate(
        in_mode(SETTINGS, mode), lambda rng: length, speeds, num_steps=num_steps, seed=0
    )
    return trace, outlook(trace, speeds, num_warm_up=4)


def test_synchronous_shares_of_time_add_up_to_one():
    speeds = Speeds(train_s=25.0, update_s=5.0, pause_s=2.0, prompt_tokens=3.0)
    _, result = run(speeds, Mode.SYNCHRONOUS)
    assert result.step_s == pytest.approx(40.0)
    assert result.generator_idle == pytest.approx(28 / 40)
    assert result.generator_paused == pytest.approx(2 / 40)
    assert result.trainer_idle == pytest.approx(10 / 40)
    assert result.running == pytest.approx(8 * 10 / 40)
    assert result.trained_tokens_per_s == pytest.approx(8 * 10 / 40)
    assert result.kv_tokens_peak == pytest.approx(8 * 13)
    assert result.kv_tokens == pytest.approx(8 * (3 + 5) * 10 / 40)
    assert (result.staleness_mean, result.staleness_max) == (0.0, 0)


def test_the_age_of_tokens_counts_the_updates_between_sampling_and_training():
    """Training takes two steps' time of generation: completions are sampled with one version in
    the first half of their batch, and wait in the queue."""
    trace, result = run(Speeds(train_s=20.0))
    assert result.trainer_idle == pytest.approx(0.0)
    # The queue is full: n_async + capacity are two batches beyond the one that is trained.
    assert result.staleness_mean == pytest.approx(2.0, abs=0.51)
    assert result.staleness_max == max(s for step in trace.steps for s in step.staleness)


@pytest.mark.parametrize("train_s", [20.1, 33.3, 47.7, 1e4 / 3])
def test_no_share_of_time_is_below_zero_however_seconds_are_rounded(train_s):
    _, result = run(Speeds(train_s=train_s, verify_s=train_s / 8, num_verifiers=1), num_steps=60)
    assert min(result.trainer_idle, result.verifier_idle, result.generator_idle) >= 0.0


def test_a_completion_that_spans_an_update_has_tokens_of_both_ages():
    """One-step-off: a batch is sampled from the moment the one before is handed over; the update
    comes 4 s later, so that 4 of its 10 tokens are one version older than the other 6."""
    trace, _ = run(Speeds(train_s=4.0), Mode.ONE_STEP_OFF)
    mean, oldest = token_ages(trace, trace.steps[4:])
    assert mean == pytest.approx(0.4)
    assert oldest == 1


def test_verifiers_that_grade_all_the_time_are_not_idle():
    _, result = run(Speeds(verify_s=5.0, num_verifiers=1), num_steps=20)
    assert result.verifier_idle == pytest.approx(0.0, abs=0.01)
    _, unbounded = run(Speeds(verify_s=5.0))
    assert unbounded.verifier_idle is None


def test_some_steps_must_be_left_after_the_warm_up():
    trace, _ = run(Speeds(), num_steps=6)
    with pytest.raises(ValueError, match="num_warm_up = 6: must be from 1 to 5"):
        outlook(trace, Speeds(), num_warm_up=6)
