"""What the preflight says of links that are good, slow, broken or behind a firewall."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import combinations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.broadcast.launch import run_local
from benchmarks.broadcast.preflight import (
    Link,
    NoMeeting,
    PairResult,
    Preflight,
    mark_slow,
    probe_links,
    reach,
    rounds_of_pairs,
    summary,
    try_connect,
)
from megatron_magistral.cluster import free_ports

HERE = "127.0.0.1"


def pair(gb_s: float | None, *, is_within_host: bool = True, link: Link = Link.GOOD) -> PairResult:
    return PairResult(0, 1, HERE, 1, link, 0.1, gb_s, is_within_host=is_within_host)


@pytest.mark.distributed
def test_links_of_one_machine_are_there() -> None:
    results, *others = run_local(probe_links, 3, timeout_s=120)
    assert [(r.source, r.target) for r in results] == [(0, 1), (0, 2), (1, 2)]
    assert all(r.link in (Link.GOOD, Link.SLOW) and r.gb_s for r in results)
    assert others == [[], []]


def _rank_with_faults(hosts: Sequence[str], interfaces: Sequence[str]) -> list[PairResult]:
    """A rank of a preflight that others look for at `hosts[rank]`."""
    rank = int(os.environ["RANK"])
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces[rank]
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(HERE, port, is_master=rank == 0, wait_for_workers=False)
    return Preflight(store, rank, len(hosts), hosts[rank], connect_s=2, collective_s=3).run()


@pytest.mark.distributed
def test_one_bad_rank_does_not_hide_what_the_others_are_like() -> None:
    """Rank 2 has a name that nobody knows; rank 3 connects, but its collectives use an interface
    that is not there."""
    hosts = [HERE, HERE, "no-such-host.invalid", HERE]
    interfaces = ["lo", "lo", "lo", "no-such-interface"]
    results = run_local(_rank_with_faults, 4, hosts, interfaces, timeout_s=120)[0]
    assert {(r.source, r.target): r.link for r in results} == {
        (0, 1): Link.GOOD,
        (0, 2): Link.UNRESOLVED,
        (0, 3): Link.NO_COLLECTIVE,
        (1, 2): Link.UNRESOLVED,
        (1, 3): Link.NO_COLLECTIVE,
        (2, 3): Link.NO_COLLECTIVE,
    }


def test_a_rank_that_never_comes_is_named_in_bounded_time() -> None:
    store = dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    (result,) = Preflight(store, 0, 2, HERE, meet_s=0.2).run()
    assert (result.source, result.target, result.link) == (1, 0, Link.ABSENT)
    assert "the rank did not start, or cannot reach the first one" in str(result)


def test_a_first_rank_that_cannot_be_reached_is_named_with_the_reason() -> None:
    (port,) = free_ports(1)
    with pytest.raises(
        NoMeeting, match=rf"rank 5 on .* -> first rank \(127.0.0.1:{port}\): refused"
    ):
        reach(HERE, port, rank=5, meet_s=0.1)


@given(num_ranks=st.integers(1, 17))
def test_every_pair_meets_once_and_no_rank_twice_at_a_time(num_ranks: int) -> None:
    rounds = rounds_of_pairs(num_ranks)
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted(
        combinations(range(num_ranks), 2)
    )
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)


def test_a_closed_port_is_told_from_a_name_that_nobody_knows() -> None:
    with closing(socket.create_server((HERE, 0))) as listener:
        port = listener.getsockname()[1]
        assert try_connect(HERE, port, 2.0)[0] is Link.GOOD
    assert try_connect(HERE, port, 2.0)[0] is Link.REFUSED
    assert try_connect("no-such-host.invalid", port, 2.0)[0] is Link.UNRESOLVED


def test_a_host_that_drops_packets_is_silent_and_named_in_bounded_time() -> None:
    """A listener whose queue is full drops new connections, as such a firewall does."""
    with closing(socket.create_server((HERE, 0), backlog=0)) as full:
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
    assert [r.link for r in mark_slow([pair(10), pair(9), pair(3)])] == [
        Link.GOOD,
        Link.GOOD,
        Link.SLOW,
    ]


def test_a_link_between_hosts_is_not_slow_for_being_no_link_within_one() -> None:
    pairs = [pair(300), pair(310), pair(305), pair(45, is_within_host=False)]
    assert {r.link for r in mark_slow(pairs)} == {Link.GOOD}


def test_where_all_links_are_bad_an_expectation_tells() -> None:
    pairs = [pair(300), pair(1, is_within_host=False), pair(1.1, is_within_host=False)]
    assert {r.link for r in mark_slow(pairs)} == {Link.GOOD}
    assert [r.link for r in mark_slow(pairs, expected_gb_s=20)] == [
        Link.GOOD,
        Link.SLOW,
        Link.SLOW,
    ]


def test_a_summary_counts_what_is_good_and_tells_kinds_apart() -> None:
    pairs = [pair(300), pair(40, is_within_host=False), pair(None, link=Link.REFUSED)]
    assert summary(pairs) == [
        "2 of 3 pairs of ranks are good",
        "within a host: 1 pairs, slowest 300.00 GB/s, median 300.00 GB/s",
        "between hosts: 1 pairs, slowest 40.00 GB/s, median 40.00 GB/s",
    ]
