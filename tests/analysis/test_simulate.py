"""Invariant 5: the lengths trained on follow the lengths sampled, whatever n_async / n_batch is.

Lengths trained on in a long window after the warm-up are compared, by a Kolmogorov-Smirnov test,
with independent draws from the distribution that the simulated generators sample from. The same
test rejects a hand-over that discards stale groups, so it can fail.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
from scipy.stats import ks_2samp

from megatron_magistral.analysis.pipeline_model import (
    Handover,
    Mode,
    Settings,
    Speeds,
    Step,
    in_mode,
)
from megatron_magistral.analysis.simulate import Stuck, simulate

N_BATCH = 64
NUM_WARM_UP_STEPS = 20
NUM_STEPS = 320
HEAVY_TAILS = {
    "lognormal": lambda rng: rng.lognormvariate(0.0, 1.0),
    "pareto_cut": lambda rng: min(rng.paretovariate(1.2), 100.0),
}


def settings(ratio: int, handover: Handover) -> Settings:
    return Settings(
        n_async=ratio * N_BATCH,
        n_batch=N_BATCH,
        queue_capacity=N_BATCH,
        group_size=4,
        handover=handover,
        max_staleness=ratio + 1,
    )


@cache
def run(ratio: int, handover: Handover, tail: str, train_time: float = 0.5) -> tuple[Step, ...]:
    trace = simulate(
        settings(ratio, handover),
        HEAVY_TAILS[tail],
        Speeds(train_s=train_time),
        num_steps=NUM_STEPS,
        seed=0,
    )
    return trace.steps


@cache
def independent_draws(tail: str) -> list[float]:
    rng = random.Random("independent")
    return [HEAVY_TAILS[tail](rng) for _ in range(100_000)]


def p_value(steps: tuple[Step, ...], tail: str) -> float:
    """Of the hypothesis that what was trained and what is sampled have one distribution."""
    window = steps[NUM_WARM_UP_STEPS:]
    trained = [length for step in window for group in step.groups for length in group.lengths]
    return ks_2samp(trained, independent_draws(tail)).pvalue


@pytest.mark.parametrize("train_time", [0.5, 8.0], ids=["generators_limit", "trainer_limits"])
@pytest.mark.parametrize("handover", [Handover.KEEP, Handover.BOUNDED])
@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("tail", HEAVY_TAILS)
def test_lengths_trained_follow_the_lengths_sampled(tail, ratio, handover, train_time):
    assert p_value(run(ratio, handover, tail, train_time), tail) > 0.01


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("tail", HEAVY_TAILS)
def test_discarding_stale_groups_fails_the_same_test(tail, ratio):
    assert p_value(run(ratio, Handover.DISCARD_STALE, tail), tail) < 1e-6


@pytest.mark.parametrize("handover", [Handover.KEEP, Handover.BOUNDED])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_no_group_is_trained_twice_or_lost(ratio, handover):
    steps = run(ratio, handover, "lognormal")
    ordinals = [group.ordinal for step in steps for group in step.groups]
    assert len(set(ordinals)) == len(ordinals) == NUM_STEPS * N_BATCH // 4
    outstanding = settings(ratio, handover).n_async + N_BATCH
    assert max(ordinals) - len(ordinals) < outstanding // 4  # the rest is in flight or waiting


@pytest.mark.parametrize("train_time", [0.5, 8.0])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_bounded_hand_over_keeps_staleness_within_the_bound(ratio, train_time):
    steps = run(ratio, Handover.BOUNDED, "pareto_cut", train_time)
    assert max(s for step in steps for s in step.staleness) <= ratio + 1


def test_the_queue_alone_bounds_mean_staleness_but_not_that_of_a_straggler():
    """Admitted and not yet trained are at most n_async + capacity, a bound on the mean only."""
    steps = run(1, Handover.KEEP, "pareto_cut", 8.0)
    staleness = [s for step in steps for s in step.staleness]
    bound = (N_BATCH + N_BATCH) / N_BATCH
    assert sum(staleness) / len(staleness) <= bound
    assert max(staleness) > 2 * bound


def test_a_trainer_that_is_never_the_bottleneck_trains_at_the_speed_of_generation():
    constant = simulate(settings(1, Handover.KEEP), lambda rng: 10.0, num_steps=9, seed=0)
    assert [step.finished_at for step in constant.steps] == [10.0 * (i + 1) for i in range(9)]


def test_a_slow_trainer_holds_generators_back_and_sets_the_pace():
    slow = Speeds(train_s=50.0)
    constant = simulate(settings(1, Handover.KEEP), lambda rng: 10.0, slow, num_steps=9, seed=0)
    assert [step.finished_at for step in constant.steps] == [
        10.0 + 50.0 * (i + 1) for i in range(9)
    ]
    admitted = max(group.ordinal for step in constant.steps for group in step.groups) * 4 + 4
    assert admitted <= 9 * N_BATCH + 2 * N_BATCH


def test_the_same_seed_gives_the_same_run():
    arguments = (settings(2, Handover.KEEP), HEAVY_TAILS["lognormal"])
    first, again, other = (simulate(*arguments, num_steps=5, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_batch": 6}, "n_batch = 6.*group_size = 4"),
        ({"n_async": 4, "queue_capacity": 4}, "n_async \\+ queue_capacity = 8.*n_batch = 64"),
        ({"max_staleness": -1}, "max_staleness = -1.*at least 0"),
        ({"drop_share": 1.0}, "drop_share = 1.0"),
    ],
)
def test_settings_that_cannot_work_are_an_error(changes, message):
    base = {
        "n_async": 64,
        "n_batch": 64,
        "queue_capacity": 64,
        "group_size": 4,
    }
    with pytest.raises(ValueError, match=message):
        Settings(**(base | changes))


def test_synchronous_training_takes_turns_and_trains_nothing_old():
    base = settings(2, Handover.KEEP)
    speeds = Speeds(train_s=50.0, update_s=7.0, pause_s=3.0)
    trace = simulate(in_mode(base, Mode.SYNCHRONOUS), lambda rng: 10.0, speeds, num_steps=4, seed=0)
    assert [step.finished_at for step in trace.steps] == [67.0 * (i + 1) for i in range(4)]
    assert {s for step in trace.steps for s in step.staleness} == {0}


def test_one_step_off_overlaps_one_batch_with_the_training_of_the_one_before():
    base = settings(2, Handover.KEEP)
    trace = simulate(
        in_mode(base, Mode.ONE_STEP_OFF), lambda rng: 10.0, Speeds(train_s=4.0), num_steps=6, seed=0
    )
    finished = [step.finished_at for step in trace.steps]
    assert finished == [10.0 * (i + 1) + 4.0 for i in range(6)]
    assert [max(step.staleness) for step in trace.steps] == [0, 1, 1, 1, 1, 1]


def test_a_batch_that_starts_at_once_is_done_when_its_longest_is_at_the_rates_of_the_curve():
    """n completions at once run at 1 / n: each token of the batch takes one second in turn."""
    rates = (0.0, *(1.0 / n for n in range(1, N_BATCH + 1)))
    base = in_mode(settings(1, Handover.KEEP), Mode.SYNCHRONOUS)
    trace = simulate(base, HEAVY_TAILS["pareto_cut"], Speeds(rates=rates), num_steps=1, seed=0)
    total = sum(length for group in trace.steps[0].groups for length in group.lengths)
    assert trace.steps[0].finished_at == pytest.approx(total)
    assert trace.steps[0].totals.generated == pytest.approx(total)


def test_generation_stands_still_for_the_pause_alone():
    speeds = Speeds(train_s=1.0, update_s=8.0, pause_s=2.0)
    slow_verifier = settings(4, Handover.KEEP)
    trace = simulate(slow_verifier, lambda rng: 50.0, speeds, num_steps=20, seed=0)
    # Every step costs one pause, as long as something runs all the time.
    assert trace.steps[-1].totals.paused == pytest.approx(20 * 2.0)
    assert trace.steps[-1].totals.idle == 0.0


def test_completions_beyond_what_runs_at_once_wait_in_their_generator():
    rates = (0.0, 1.0, 1.0)  # two at a time
    base = in_mode(settings(1, Handover.KEEP), Mode.SYNCHRONOUS)
    trace = simulate(base, lambda rng: 3.0, Speeds(rates=rates), num_steps=1, seed=0)
    assert trace.steps[0].finished_at == N_BATCH / 2 * 3.0


def test_every_new_prompt_holds_generation_up():
    base = in_mode(settings(1, Handover.KEEP), Mode.SYNCHRONOUS)
    trace = simulate(base, lambda rng: 10.0, Speeds(start_s=0.25), num_steps=3, seed=0)
    step_s = 10.0 + N_BATCH * 0.25
    assert [step.finished_at for step in trace.steps] == [step_s * (i + 1) for i in range(3)]


def test_few_verifiers_set_the_pace():
    speeds = Speeds(verify_s=1.0, num_verifiers=2)
    trace = simulate(settings(1, Handover.KEEP), lambda rng: 1.0, speeds, num_steps=40, seed=0)
    span = trace.steps[-1].finished_at - trace.steps[19].finished_at
    assert span == pytest.approx(20 * N_BATCH / 2, rel=0.02)


def test_dropped_groups_are_replaced_and_cost_their_generation():
    drops = replace(settings(1, Handover.KEEP), drop_share=0.5)
    trace = simulate(drops, lambda rng: 10.0, num_steps=40, seed=0)
    plain = simulate(settings(1, Handover.KEEP), lambda rng: 10.0, num_steps=40, seed=0)
    ratio = trace.steps[-1].finished_at / plain.steps[-1].finished_at
    assert ratio == pytest.approx(2.0, rel=0.1)


def test_a_bound_of_less_than_what_is_in_flight_holds_admission_back():
    tight = replace(settings(4, Handover.BOUNDED), max_staleness=1)
    speeds = Speeds(train_s=1.0)
    trace = simulate(tight, HEAVY_TAILS["pareto_cut"], speeds, num_steps=60, seed=0)
    assert max(s for step in trace.steps for s in step.staleness) <= 1
    # Never more than this batch and the next are under way, though n_async would allow four.
    assert trace.steps[-1].totals.running / trace.steps[-1].finished_at <= 2 * N_BATCH


def test_what_can_never_happen_is_an_error_and_no_endless_loop():
    with pytest.raises(Stuck, match="0 steps are trained"):
        simulate(settings(1, Handover.KEEP), lambda rng: float("inf"), num_steps=1, seed=0)
