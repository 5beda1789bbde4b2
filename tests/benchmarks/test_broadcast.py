"""The broadcast benchmark: its ranks, and what it says of links and launchers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.broadcast.__main__ import app
from benchmarks.broadcast.calibrate import (
    Bare,
    cases,
    compare,
    overlap_of,
    predicted,
    sampled_bytes,
    spread,
)
from benchmarks.broadcast.engine import EngineReport
from benchmarks.broadcast.launch import RankFailed, adopt_launcher, preload, run_local
from benchmarks.broadcast.parts import GatherTime, Parts
from benchmarks.broadcast.plot import plot_sweep
from benchmarks.broadcast.ranks import run_rank
from benchmarks.broadcast.report import Report, Spread, summarise
from benchmarks.broadcast.results import Options, Result, Round, SenderCpu
from benchmarks.broadcast.sweep import Skipped, settings_of, smaller_world, sweep
from megatron_magistral.weights.checksum import HEAD_BYTES
from megatron_magistral.weights.gather import GatherSeconds
from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout
from megatron_magistral.weights.plan import gather_plan
from megatron_magistral.weights.plan_cost import packed_bytes
from megatron_magistral.weights.presets import sized
from megatron_magistral.weights.settings import PlanKind
from megatron_magistral.weights.transfer import UpdateTimings

preload(run_rank.__module__)

MIB = 1 << 20
OPTIONS = Options(
    arch=sized(4),
    trainer=TrainerLayout(tp=2),
    generator=GeneratorLayout(replicas=1, tp=2),
    bucket_bytes=MIB,
    rounds=2,
)


@pytest.mark.distributed
def test_updates_reach_all_ranks_and_are_compared_with_a_bare_broadcast() -> None:
    """That the weights are right is checked by the sender: the first update reads back all."""
    result, *_ = run_local(run_rank, OPTIONS.world_size, OPTIONS, timeout_s=200)
    plan = gather_plan(OPTIONS.arch, OPTIONS.trainer, OPTIONS.generator, bucket_bytes=MIB)
    for each in result.rounds:
        assert each.timings.num_bytes == sum(bucket.num_bytes for bucket in plan.buckets)
        assert each.timings.num_buckets == len(plan.buckets)
        assert len(each.engines) == 2 and all(e.receive_s > 0 < e.load_s for e in each.engines)
    assert len(result.trainer_extra_bytes) == len(result.generator_extra_bytes) == 2
    report = summarise(OPTIONS, result, step_s=60.0)
    assert report.whole_per_bare is not None and 0 < report.paused_share < 1
    assert {what for what, value in report.cpu_ms_per_mib.items() if value > 0} >= {
        "bare, sender",
        "update, receive",
        "update, load",
    }
    comparison = compare(OPTIONS, result)
    assert comparison is not None and comparison.predicted_s > comparison.bare_broadcast_s
    assert sum(comparison.measured_parts_s.values()) == pytest.approx(comparison.measured_s)
    assert sum(comparison.predicted_parts_s.values()) == pytest.approx(comparison.predicted_s)


@pytest.mark.distributed
def test_under_the_plan_direct_each_rank_gets_its_own_part_alone() -> None:
    """Two ranks each of a trainer and of two generators: rows, columns and what nobody divides."""
    generator = GeneratorLayout(replicas=2, tp=2)
    options = replace(OPTIONS, generator=generator, plan=PlanKind.DIRECT, rounds=1)
    result, *_ = run_local(run_rank, options.world_size, options, timeout_s=200)
    (measured,) = result.rounds
    assert len(measured.engines) == 4
    assert all(e.receive_s > 0 and e.load_s == 0 for e in measured.engines)
    assert measured.timings.num_checked > 0
    comparison = compare(options, result)
    assert comparison is not None and comparison.predicted_s > 0


PARTS = Parts(
    gather=GatherTime(first_s=10.0, all_s=13.0),
    small_broadcast_s=0.1,
    in_channels_s=None,
    copy_in_s=1.0,
    copy_out_s=4.0,
    call_s=0.5,
    named_call_s=0.5,
    tensor_s=0.0,
    digest_gb_s=1e9,
)


def test_a_prediction_is_the_sum_of_what_was_measured_apart() -> None:
    """Where nothing hides: six calls, one for each bucket, all gathering, the wire, loading."""
    plan = gather_plan(OPTIONS.arch, OPTIONS.trainer, OPTIONS.generator, bucket_bytes=MIB)
    times = predicted(OPTIONS, Bare(PARTS, broadcast_s=20.0, overlap=0.0))
    calls_s = (6 + len(plan.buckets)) * 0.5
    assert times.total_s == pytest.approx(13.0 + 20.0 + 4.0 + calls_s, rel=1e-6)
    assert times.first_bucket_s == pytest.approx(10.0)


def test_under_the_plan_direct_a_prediction_counts_channels_and_copies_of_small_parts() -> None:
    """Of 4 MiB in matrices below a mebibyte, every part is: all is packed, and taken out again."""
    options, parts = replace(OPTIONS, plan=PlanKind.DIRECT), replace(PARTS, in_channels_s=16.0)
    plan = gather_plan(OPTIONS.arch, OPTIONS.trainer, OPTIONS.generator, bucket_bytes=MIB)
    times = predicted(options, Bare(parts, broadcast_s=20.0, overlap=0.0))
    calls_s = (6 + len(plan.buckets)) * 0.5
    assert times.total_s == pytest.approx(13.0 + 16.0 + 1.0 + 4.0 + calls_s, rel=0.01)


def test_under_the_plan_direct_large_rows_are_not_copied_and_columns_only_by_the_sender() -> None:
    arch, trainer = sized(256), TrainerLayout()
    for tp in (1, 2):
        plan = gather_plan(arch, trainer, GeneratorLayout(tp=tp))
        (bucket,) = plan.buckets
        packed, unpacked = packed_bytes(plan, bucket)
        columns = sum(2 * t.num_elements for t in plan.tensors if t.axis == 1)
        assert unpacked < bucket.num_bytes / 10 and 0 < columns < bucket.num_bytes
        assert packed == pytest.approx(unpacked * tp + (columns if tp > 1 else 0), rel=0.05)


def test_what_hides_behind_a_broadcast_is_what_its_ranks_leave_of_the_cores() -> None:
    assert [overlap_of("gloo", ranks, num_cores=8) for ranks in (16, 8, 5, 4, 2)] == [
        0.0,
        0.0,
        pytest.approx(0.6),
        1.0,
        1.0,
    ]
    assert overlap_of("nccl", 16, num_cores=8) == 1.0


def test_the_sample_of_an_update_is_a_share_of_its_bytes_and_something_of_each_bucket() -> None:
    trainer, generator = OPTIONS.trainer, OPTIONS.generator
    small = gather_plan(OPTIONS.arch, trainer, generator, bucket_bytes=1)
    for bucket in small.buckets:
        is_short = bucket.num_bytes <= HEAD_BYTES
        assert (sampled_bytes(small, bucket) == bucket.num_bytes) == is_short
    (whole,) = (plan := gather_plan(OPTIONS.arch, trainer, generator)).buckets
    assert 1 / 16 < sampled_bytes(plan, whole) / whole.num_bytes < 1 / 8


def test_the_error_of_a_model_is_told_without_its_sign() -> None:
    assert spread([-0.5, 0.1, 0.2]) == (0.2, 0.5)


def test_the_cost_model_is_tried_on_every_kind_of_layout() -> None:
    tried = cases(OPTIONS)
    assert {(o.trainer.tp, o.trainer.pp) for o in tried} >= {(1, 1), (2, 1), (1, 2)}
    assert {(o.generator.replicas, o.generator.tp) for o in tried} >= {(1, 1), (2, 1), (1, 2)}
    assert len({o.bucket_bytes for o in tried}) == 2 and len({o.arch for o in tried}) == 2


def test_a_sweep_covers_bucket_and_world_sizes_largest_worlds_first() -> None:
    options = replace(OPTIONS, generator=GeneratorLayout(replicas=5), bucket_bytes=8 * MIB)
    tried = [(o.generator.replicas, o.bucket_bytes // MIB) for o in settings_of(options)]
    assert tried == [(n, size) for n in (5, 4, 2, 1) for size in (1, 2, 4, 8)]


def test_a_sweep_goes_on_after_a_failure_and_begins_nothing_after_its_limit() -> None:
    def run(options: Options) -> Result:
        if options.bucket_bytes == MIB // 4:
            raise RankFailed("rank 1 is unwell")
        return Result("gloo", 1)

    options = replace(OPTIONS, generator=GeneratorLayout())
    ended = list(sweep(settings_of(options), run, limit_s=100))
    assert [type(each) for each in ended] == [tuple, Skipped, tuple, tuple]
    assert isinstance(ended[1], Skipped) and "unwell" in ended[1].why
    too_late = list(sweep(settings_of(options), run, limit_s=-1))
    assert all(isinstance(each, Skipped) and "not begun" in each.why for each in too_late)


def test_runs_of_a_sweep_under_a_launcher_meet_at_places_of_their_own() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_PORT": "29500"}
    before = dict(environment)
    with smaller_world(environment, 3, number=4):
        assert environment["WORLD_SIZE"] == "3" and environment["MASTER_PORT"] == "29505"
        assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert environment == before


def a_round(scale: float) -> Round:
    """Seconds: 1 to prepare, 8 of transfer and 1 each of checksum and calls; bare 5."""
    timings = UpdateTimings(
        version=1,
        num_buckets=2,
        num_bytes=11 * 10**9,
        prepare_s=1 * scale,
        pause_s=10 * scale,
        transfer_s=8 * scale,
        checksum_s=1 * scale,
        gather_s=0.5,
        num_checked=3,
    )
    engine = EngineReport(pause_s=0.5, receive_s=7, load_s=1, resume_s=0.5, extra_bytes=30)
    cpu = SenderCpu(update_s=4, gather_s=1, bare_s=2)
    return Round(timings, GatherSeconds(0.3, 0.2), 5.0 * scale, 6.0, (engine,), cpu)


def report_of(rounds: list[Round]) -> Report:
    result = Result("gloo", max_bucket_bytes=20, rounds=rounds, trainer_extra_bytes=[40, None])
    result.generator_extra_bytes = [30]
    return summarise(replace(OPTIONS, trainer=TrainerLayout(pp=2)), result, step_s=100.0)


def test_a_report_counts_bandwidth_as_nccl_tests_does_and_ratios_within_rounds() -> None:
    report = report_of([a_round(1), a_round(2), a_round(4)])
    assert report.phases["whole update"] == Spread(22_000, 44_000, 44_000)
    assert report.phases["control calls"].p50_ms == 2_000
    # Bytes / seconds; of a broadcast the bus carries each byte once: factor 1.
    assert report.algorithm_gb_s["bare broadcast"] == pytest.approx(1.1)
    assert report.algorithm_gb_s["whole update"] == pytest.approx(0.5)
    assert report.bus_gb_s == report.algorithm_gb_s
    assert report.whole_per_bare == pytest.approx(11 / 5)
    assert report.pause_per_transfer == pytest.approx(10 / 8)
    assert report.paused_share == pytest.approx(20 / 100)
    assert report.extra_buckets == {"trainer": 2.0, "generator": 1.5}
    assert [miss.split(" > ")[0] for miss in report.missed()] == [
        "whole update / bare broadcast 2.20",
        "pause / transfer 1.25",
    ]


def test_a_sweep_is_drawn(tmp_path: Path) -> None:
    reports = [report_of([a_round(1)])]
    plot_sweep(reports, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_an_engine_that_is_not_there_is_one_line() -> None:
    result = CliRunner().invoke(app, ["--engine", "http://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "engine 127.0.0.1:1" in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--json", "/nope/x.json"), "--json /nope/x.json: no such directory"),
        (("--sweep", "--plot", "x.foo"), "--plot x.foo: must end in .svg or .png"),
        (("--plot", "x.png"), "--plot: needs --sweep"),
        (("--expected-gb-s", "1"), "--expected-gb-s: needs --preflight"),
        (("--sweep", "--calibrate"), "--sweep and --calibrate: must be one of them"),
    ],
)
def test_what_would_fail_or_do_nothing_is_refused_before_any_rank_starts(
    arguments: tuple[str, ...], why: str
) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and why in result.output


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu017", "gpu017"),
        ("gpu[017-020,031],other", "gpu017"),
        ("a[3,5]", "a3"),
        ("x1,gpu[1-2]", "x1"),
    ],
)
def test_srun_gives_a_rank_and_the_first_host(nodes: str, first: str) -> None:
    environment = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": nodes,
    }
    assert adopt_launcher(environment)
    assert environment["RANK"] == "3" and environment["WORLD_SIZE"] == "8"
    assert environment["LOCAL_RANK"] == "1" and environment["MASTER_ADDR"] == first


def test_a_shell_within_an_allocation_is_no_rank() -> None:
    assert not adopt_launcher({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
    assert not adopt_launcher({})


def _die_on_one() -> int:
    if os.environ["RANK"] == "1":
        raise ValueError("rank one is unwell")
    return 0


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RankFailed, match=r"rank 1:\n[^$]*rank one is unwell"):
        run_local(_die_on_one, 2, timeout_s=60)


def test_percentiles_are_those_of_nearest_rank() -> None:
    assert Spread.of([n / 1000 for n in range(1, 101)]) == Spread(50.5, 95.0, 100.0)
