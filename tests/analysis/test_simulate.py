"""Invariant 5: the lengths trained on follow the lengths sampled, whatever n_async / n_batch is.

Lengths trained on in a long window after the warm-up are compared, by a Kolmogorov-Smirnov test,
with independent draws from the distribution that the simulated generators sample from. The same
test rejects a hand-over that discards stale groups, so it can fail.
"""

import random
from functools import cache

import pytest
from scipy.stats import ks_2samp

from megatron_magistral.analysis.simulate import Handover, Settings, Step, simulate

N_BATCH = 64
NUM_WARM_UP_STEPS = 20
NUM_STEPS = 320
HEAVY_TAILS = {
    "lognormal": lambda rng: rng.lognormvariate(0.0, 1.0),
    "pareto_cut": lambda rng: min(rng.paretovariate(1.2), 100.0),
}


def settings(ratio: int, handover: Handover, train_time: float = 0.5) -> Settings:
    return Settings(
        n_async=ratio * N_BATCH,
        n_batch=N_BATCH,
        queue_capacity=N_BATCH,
        group_size=4,
        train_time=train_time,
        handover=handover,
        max_staleness=ratio + 1,
    )


@cache
def run(ratio: int, handover: Handover, tail: str, train_time: float = 0.5) -> tuple[Step, ...]:
    return simulate(
        settings(ratio, handover, train_time), HEAVY_TAILS[tail], num_steps=NUM_STEPS, seed=0
    )


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
    constant = simulate(settings(1, Handover.KEEP, 0.0), lambda rng: 10.0, num_steps=9, seed=0)
    assert [step.finished_at for step in constant] == [10.0 * (i + 1) for i in range(9)]


def test_a_slow_trainer_holds_generators_back_and_sets_the_pace():
    constant = simulate(settings(1, Handover.KEEP, 50.0), lambda rng: 10.0, num_steps=9, seed=0)
    assert [step.finished_at for step in constant] == [10.0 + 50.0 * (i + 1) for i in range(9)]
    admitted = max(group.ordinal for step in constant for group in step.groups) * 4 + 4
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
        ({"handover": Handover.BOUNDED, "max_staleness": 1}, "max_staleness = 1.*= 2"),
    ],
)
def test_settings_that_cannot_work_are_an_error(changes, message):
    base = {
        "n_async": 64,
        "n_batch": 64,
        "queue_capacity": 64,
        "group_size": 4,
        "train_time": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        Settings(**(base | changes))
