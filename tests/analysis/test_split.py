"""Forecasts of the shipped kinds of runs, and how GPUs are divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_magistral.analysis.hardware import GPUS, Assumptions
from megatron_magistral.analysis.lengths import parse_lengths
from megatron_magistral.analysis.pipeline_model import Mode
from megatron_magistral.analysis.plan_tables import advice, limited_by
from megatron_magistral.analysis.roofline import Parameters, decode_curve
from megatron_magistral.analysis.speeds import SpeedCurve
from megatron_magistral.analysis.split import Forecast, Site, divide
from megatron_magistral.config_file import load
from megatron_magistral.placement import PlacementError
from megatron_magistral.weights.presets import PRESETS, num_parameters
from megatron_magistral.weights.settings import PlanKind

SMALL = PRESETS["magistral-small-24b"]
CONFIG = load(Path(__file__).parents[2] / "configs" / "small_rl.yaml", check_files=False)
SITE = Site(
    gpu=GPUS["h100"],
    lengths=parse_lengths("lognormal:6000,0.8", CONFIG.reward.l_max),
    verifiers_per_node=512,
)


def forecast(site: Site = SITE, **rl) -> Forecast:
    update = {"rl": CONFIG.rl.model_copy(update=rl)}
    return Forecast(CONFIG.model_copy(update=update), SMALL, site)


def test_asynchrony_gains_and_the_same_seed_gives_the_same_numbers():
    plan = forecast(n_batch=256, n_minibatch=256, n_async=512)
    outlooks = {mode: plan.outlook(mode) for mode in Mode}
    assert (
        outlooks[Mode.ASYNCHRONOUS].steps_per_h
        > outlooks[Mode.ONE_STEP_OFF].steps_per_h
        > outlooks[Mode.SYNCHRONOUS].steps_per_h
    )
    assert plan.outlook() == outlooks[Mode.ASYNCHRONOUS]
    assert plan.outlook(seed=1) != outlooks[Mode.ASYNCHRONOUS]


def test_a_simulated_step_takes_what_the_slower_side_takes():
    plan = forecast(n_batch=256, n_minibatch=256, n_async=512, queue_size=2560)
    slower = max(plan.train_s, plan.generate_s)
    outlook = plan.outlook()
    assert outlook.step_s == pytest.approx(slower, rel=0.1)
    assert not plan.is_held_back(outlook)


def test_a_small_queue_holds_generators_back_and_is_named():
    """Groups that wait for their slowest completion count, though most of theirs are done."""
    plan = forecast(n_batch=256, n_minibatch=256, n_async=512, queue_size=16)
    outlook = plan.outlook()
    assert plan.is_held_back(outlook)
    assert limited_by(plan, outlook) == "queue"
    assert "rl.queue_size" in advice(plan, outlook)[0]


def test_the_split_puts_gpus_where_they_are_missing():
    sites = (replace(SITE, assumed=Assumptions(train_mfu=mfu)) for mfu in (0.8, 0.05))
    few, many = (
        max(divide(forecast(site), 256), key=lambda f: -max(f.train_s, f.generate_s))
        for site in sites
    )
    assert many.layout.world_size > few.layout.world_size
    assert few.num_gpus <= 256


def test_every_candidate_fits_the_nodes_and_the_batch():
    for candidate in divide(forecast(), 128):
        assert candidate.num_gpus <= 128
        assert candidate.rl.n_minibatch % candidate.layout.dp == 0


@pytest.mark.parametrize(("num_gpus", "words"), [(8, "too few"), (60, "whole nodes of 8")])
def test_gpus_that_cannot_be_divided_are_an_error(num_gpus, words):
    with pytest.raises(PlacementError, match=words):
        divide(forecast(), num_gpus)


def test_what_does_not_fit_is_named_with_the_keys_that_help():
    generator_config = CONFIG.generator.model_copy(update={"tensor_parallel": 2})
    config = CONFIG.model_copy(update={"generator": generator_config})
    trainer, generator = Forecast(config, PRESETS["dense-120b"], SITE).problems()
    assert "parallel.tensor" in trainer and "rl.microbatch_tokens" in trainer
    assert "generator.tensor_parallel" in generator
    assert forecast().problems() == []


def test_measured_speeds_replace_the_model():
    curve = SpeedCurve(((1, 10.0), (64, 100.0)))
    known = replace(
        SITE, curve=curve, train_tokens_per_s=123.0, update_s=3.0, pause_s=1.0, start_s=0.5
    )
    plan = forecast(known)
    assert plan.curve is curve
    assert plan.train_tokens_per_s == 123.0
    assert plan.update_times == (3.0, 1.0)
    assert plan.speeds.start_s == 0.5 / CONFIG.generator.num_replicas


def test_an_update_is_that_of_the_plan_of_the_run():
    slow_loads = replace(SITE, links=replace(SITE.links, hbm_copy_gb_s=10.0))
    (gather_s, _), (direct_s, _) = (
        forecast(slow_loads, weight_plan=kind).update_times for kind in PlanKind
    )
    assert direct_s < gather_s  # which loads what it has received


def test_completions_that_caches_do_not_hold_are_noted():
    crowded = forecast(n_async=2**20)
    assert "rl.n_async = 1,048,576" in crowded.notes()[0]


def test_a_token_costs_the_parameters_that_it_uses():
    moe = PRESETS["moe-700b"]
    assert Parameters.of(moe).active < 0.06 * num_parameters(moe)
    lookup = SMALL.vocab_size * SMALL.hidden_size
    assert Parameters.of(SMALL).active == num_parameters(SMALL) - lookup


def test_more_completions_at_once_are_faster_together_and_slower_each():
    memory = forecast().generator_memory
    curve = decode_curve(SMALL, 4, memory, 8000.0, 300, SITE.gpu, SITE.assumed)
    together = [speed for _, speed in curve.points]
    each = [speed / count for count, speed in curve.points]
    assert together == sorted(together)
    assert each == sorted(each, reverse=True)
    # Alone, a token waits for all weights; a GPU reads no faster than its memory.
    assert each[0] < SITE.gpu.hbm_gb_s * 1e9 / memory.weights


def test_a_kv_budget_bounds_how_many_completions_run_on_a_generator():
    budget = 10 * (512 + CONFIG.reward.l_max)
    assert forecast(kv_budget_tokens=budget).max_running == 10
    assert forecast(kv_budget_tokens=budget, kv_reserve=0.25).max_running == 38
    ample = forecast(kv_budget_tokens=10**9)
    assert ample.max_running == forecast().max_running > 38
