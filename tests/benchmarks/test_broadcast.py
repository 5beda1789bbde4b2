"""The broadcast benchmark: its ranks, and what it says of links and launchers."""

from __future__ import annotations

import os
import socket
from contextlib import closing, suppress
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.broadcast.calibrate import (
    calibrated,
    links_of,
    predicted,
    relative_error,
    variants,
)
from benchmarks.broadcast.launch import RankFailed, adopt_launcher, preload, run_local
from benchmarks.broadcast.preflight import (
    Link,
    PairResult,
    mark_slow,
    probe_links,
    rounds_of_pairs,
    try_connect,
)
from benchmarks.broadcast.ranks import run_rank
from benchmarks.broadcast.report import Spread, summarise
from benchmarks.broadcast.results import Options
from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout
from megatron_magistral.weights.plan import gather_plan
from megatron_magistral.weights.presets import sized

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
    links = links_of(result)
    errors = [
        abs(relative_error(predicted(OPTIONS, each), result))
        for each in (calibrated(OPTIONS, result), links, replace(links, overlap=0.5))
    ]
    assert errors[0] == min(errors)


def test_a_calibration_is_checked_on_settings_that_differ_in_one_thing() -> None:
    fields = ("arch", "trainer", "generator", "bucket_bytes")
    for name, setting in variants(OPTIONS):
        changed = [f for f in fields if getattr(setting, f) != getattr(OPTIONS, f)]
        assert len(changed) <= 1, name


@pytest.mark.distributed
def test_links_of_one_machine_are_there() -> None:
    options = replace(OPTIONS, trainer=TrainerLayout())
    results, *_ = run_local(probe_links, 3, options, timeout_s=120)
    assert [(r.source, r.target) for r in results] == [(0, 1), (0, 2), (1, 2)]
    assert all(r.link in (Link.GOOD, Link.SLOW) and r.gb_s for r in results)


@given(num_ranks=st.integers(1, 17))
def test_every_pair_meets_once_and_no_rank_twice_at_a_time(num_ranks: int) -> None:
    rounds = rounds_of_pairs(num_ranks)
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted(
        combinations(range(num_ranks), 2)
    )
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)


def test_a_closed_port_is_told_from_one_that_swallows_packets() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        assert try_connect("127.0.0.1", port, 2.0)[0] is Link.GOOD
    assert try_connect("127.0.0.1", port, 2.0)[0] is Link.REFUSED
    assert try_connect("no-such-host.invalid", port, 2.0)[0] is Link.UNRESOLVED


def test_a_host_that_drops_packets_is_silent_and_named_in_bounded_time() -> None:
    """A listener whose queue is full drops new connections, as such a firewall does."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as full:
        host, port = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            with suppress(BlockingIOError):
                each.connect((host, port))
        link, detail = try_connect(host, port, 0.5)
        for each in waiting:
            each.close()
    assert link is Link.SILENT
    message = str(PairResult(0, 3, host, port, link, 0.5, None, detail))
    assert f"ranks 0 -> 3 ({host}:{port}): no answer after 0.5 s; packets vanish" in message


def test_a_pair_below_half_of_the_median_speed_is_slow() -> None:
    pairs = [PairResult(0, n, "host", 1, Link.GOOD, 0.1, gb_s) for n, gb_s in enumerate([10, 9, 3])]
    assert [pair.link for pair in mark_slow(pairs)] == [Link.GOOD, Link.GOOD, Link.SLOW]


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
