"""The all-reduce of the preflight, over gloo."""

from __future__ import annotations

import os
import socket

import pytest

from megatron_magistral.slurm import links
from megatron_magistral.slurm.links import LinkError, LinkResult, check_links
from tests.distributed.ranks import run_ranks

NODES = ("n0", "n0", "n1", "n1")


def check(port: int) -> LinkResult:
    rank = int(os.environ["RANK"])
    return check_links(rank, NODES, rank % 2, "127.0.0.1", port)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.distributed
def test_every_rank_gets_the_right_sum_and_every_nodes_clock() -> None:
    results = run_ranks(check, 4, free_port())
    assert {result.backend for result in results} == {"gloo"}
    assert all(set(result.clocks) == {"n0", "n1"} for result in results)


def test_a_node_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CHECK_IN_TIMEOUT_S", 0.5)
    with pytest.raises(LinkError, match=r"^n1: 1 of 2 ranks did not reach n0 within"):
        check_links(0, ("n0", "n1"), 0, "127.0.0.1", free_port())


def test_a_first_node_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CHECK_IN_TIMEOUT_S", 0.5)
    with pytest.raises(LinkError, match=r"^n1: no word from n0 at 127\.0\.0\.1:\d+ after"):
        check_links(1, ("n0", "n1"), 0, "127.0.0.1", free_port())
