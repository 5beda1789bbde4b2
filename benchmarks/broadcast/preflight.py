"""Pair by pair: is a link there, does a collective work over it, how fast is it.

A broken link, a firewall and a slow link look alike from a job that hangs. Here each pair of ranks
connects by TCP in bounded time, then runs a small all-reduce in bounded time, then moves data; the
first thing that fails says what it looks like. Disjoint pairs are tried at the same time.
"""

from __future__ import annotations

import errno
import json
import socket
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum

import torch
import torch.distributed as dist

from benchmarks.broadcast.groups import join, local_host
from benchmarks.broadcast.results import Options

CONNECT_S = 5.0
COLLECTIVE_S = 20.0
PROBE_BYTES = 16 << 20
SLOW_SHARE = 0.5  # of the median pair


class Link(StrEnum):
    GOOD = "good"
    SLOW = "slow"
    UNRESOLVED = "host name unknown"
    REFUSED = "refused"
    UNREACHABLE = "no route"
    SILENT = "no answer"
    NO_COLLECTIVE = "no collective"


# What each looks like to whoever has to put it right.
MEANING = {
    Link.UNRESOLVED: "the name does not resolve here: check DNS or /etc/hosts",
    Link.REFUSED: "the host answers but rejects the port: a firewall that rejects, or another host",
    Link.UNREACHABLE: "no route to the host: a network or an interface that is down or separate",
    Link.SILENT: "packets vanish: a firewall that drops them, or a host that is down",
    Link.NO_COLLECTIVE: "TCP connects but the collective does not end: it uses other ports or "
    "another interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, NCCL_IB_HCA)",
    Link.SLOW: "much slower than the other pairs: a bad cable or NIC, or traffic over the wrong "
    "interface",
}


@dataclass(frozen=True)
class PairResult:
    """What rank `source` found on its way to `target`, which listens at `host`:`port`."""

    source: int
    target: int
    host: str
    port: int
    link: Link
    seconds: float
    gb_s: float | None = None
    detail: str = ""

    def __str__(self) -> str:
        words = f"ranks {self.source} -> {self.target} ({self.host}:{self.port}): {self.link}"
        if self.gb_s is not None:
            words += f", {self.gb_s:.2f} GB/s"
        meaning = MEANING.get(self.link)
        after = f" after {self.seconds:.1f} s" if self.gb_s is None else ""
        return f"{words}{after}; {meaning}" if meaning else words


def try_connect(host: str, port: int, timeout_s: float) -> tuple[Link, str]:
    """What a TCP connection meets."""
    try:
        with closing(socket.create_connection((host, port), timeout=timeout_s)):
            return Link.GOOD, ""
    except socket.gaierror as error:
        return Link.UNRESOLVED, str(error)
    except ConnectionRefusedError as error:
        return Link.REFUSED, str(error)
    except TimeoutError as error:
        return Link.SILENT, str(error)
    except OSError as error:
        unreachable = (errno.EHOSTUNREACH, errno.ENETUNREACH)
        return Link.UNREACHABLE if error.errno in unreachable else Link.SILENT, str(error)


def rounds_of_pairs(num_ranks: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds of disjoint pairs: the circle method of tournaments."""
    seats = [*range(num_ranks), *([-1] * (num_ranks % 2))]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if min(a, b) >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def mark_slow(results: Sequence[PairResult]) -> list[PairResult]:
    """Pairs below half of the median speed are slow."""
    speeds = [r.gb_s for r in results if r.gb_s is not None]
    if not speeds:
        return list(results)
    bound = SLOW_SHARE * statistics.median(speeds)
    return [
        PairResult(**(asdict(r) | {"link": Link.SLOW}))
        if r.gb_s is not None and r.gb_s < bound
        else r
        for r in results
    ]


def probe_links(options: Options) -> list[PairResult]:
    """Joins the ranks of a benchmark, which call it alike, and looks at all their links."""
    torch.set_num_threads(1)
    join(options)
    try:
        return run_preflight(local_host())
    finally:
        dist.destroy_process_group()


def run_preflight(host: str, connect_s: float = CONNECT_S) -> list[PairResult]:
    """All pairs of the ranks in the default group; the same results on every rank.

    The ranks must have met: whoever cannot reach MASTER_ADDR fails before.
    """
    store = dist.distributed_c10d._get_default_store()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with closing(socket.create_server(("", 0), backlog=world_size)) as listener:
        address = json.dumps([host, listener.getsockname()[1]])
        store.set(f"preflight/{rank}", address)
        results = []
        for number, pairs in enumerate(rounds_of_pairs(world_size)):
            mine = next((pair for pair in pairs if rank in pair), None)
            if mine is not None:
                target = json.loads(store.get(f"preflight/{mine[1]}"))
                results.append(_try_pair(mine, target[0], target[1], connect_s, number))
            dist.barrier()
    found: list[list[PairResult]] = [[] for _ in range(world_size)]
    dist.all_gather_object(found, [r for r in results if r.source == rank])
    return mark_slow(
        sorted((r for each in found for r in each), key=lambda r: (r.source, r.target))
    )


def _try_pair(
    pair: tuple[int, int], host: str, port: int, connect_s: float, number: int
) -> PairResult:
    """Both ranks of the pair call it; what the first of them returns counts."""
    source, target = pair
    start = time.monotonic()
    store = dist.distributed_c10d._get_default_store()
    verdict = f"preflight/{number}/{source}-{target}"
    if dist.get_rank() == source:
        link, detail = try_connect(host, port, connect_s)
        store.set(verdict, link.value)
    else:
        link, detail = Link(store.get(verdict).decode()), ""
    gb_s = None
    if link is Link.GOOD:
        try:
            gb_s = _measure(pair)
        except RuntimeError as error:
            link, detail = Link.NO_COLLECTIVE, str(error).splitlines()[0]
    return PairResult(source, target, host, port, link, time.monotonic() - start, gb_s, detail)


def _measure(pair: tuple[int, int]) -> float:
    """GB/s of a broadcast between the two, after a small all-reduce. Raises RuntimeError."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    group = dist.new_group(
        list(pair),
        timeout=timedelta(seconds=COLLECTIVE_S),
        backend=backend,
        use_local_synchronization=True,
    )
    dist.all_reduce(torch.ones(1, device=device), group=group)
    data = torch.ones(PROBE_BYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(3):
        dist.barrier(group)
        start = time.monotonic()
        dist.broadcast(data, src=pair[0], group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - start)
    dist.destroy_process_group(group)
    return PROBE_BYTES / min(seconds) / 1e9
