"""The broadcast benchmark with several pipeline stages, each of which sends its own part."""

from __future__ import annotations

import pytest

from benchmarks.broadcast.launch import preload, run_local
from benchmarks.broadcast.ranks import run_rank
from benchmarks.broadcast.results import Options
from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout
from megatron_magistral.weights.plan import gather_plan
from megatron_magistral.weights.presets import sized
from megatron_magistral.weights.settings import PlanKind

preload(run_rank.__module__)

MIB = 1 << 20


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PlanKind)
def test_every_stage_sends_its_buckets_to_both_ranks_of_a_generator(plan: PlanKind) -> None:
    """That the weights are right is checked by the sender: the first update reads back all."""
    options = Options(
        arch=sized(4),
        trainer=TrainerLayout(tp=2, pp=2),
        generator=GeneratorLayout(replicas=1, tp=2),
        bucket_bytes=MIB,
        rounds=1,
        plan=plan,
    )
    result, *_ = run_local(run_rank, options.world_size, options, timeout_s=200)
    plan = gather_plan(options.arch, options.trainer, options.generator, bucket_bytes=MIB)
    (measured,) = result.rounds
    assert measured.timings.num_buckets == len(plan.buckets)
    assert measured.timings.num_bytes == sum(bucket.num_bytes for bucket in plan.buckets)
    assert len(measured.engines) == 2
    assert all(engine.receive_s > 0 for engine in measured.engines)
    assert len(result.trainer_extra_bytes) == 4
