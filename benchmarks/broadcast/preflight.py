"""Pair by pair: is a link there, does a collective work over it, how fast is it.

A broken link, a firewall and a slow link look alike from a job that hangs. Here ranks meet at a
store on the first one, which is all that they need to have in common. Then each pair connects by
TCP, runs a small all-reduce in a group of its own, and moves data, each in bounded time; the first
thing that fails says what it looks like. Disjoint pairs are tried at the same time.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from enum import StrEnum

import torch
import torch.distributed as dist

from benchmarks.broadcast.groups import local_host, own_device, wire_backend

MEET_S = 60.0
CONNECT_S = 5.0
COLLECTIVE_S = 20.0
RETRY_S = 0.5
PROBE_BYTES = 16 << 20
NUM_PROBES = 3
SLOW_SHARE = 0.5  # of the median pair


class Link(StrEnum):
    GOOD = "good"
    SLOW = "slow"
    UNRESOLVED = "host name unknown"
    REFUSED = "refused"
    UNREACHABLE = "no route"
    SILENT = "no answer"
    NO_COLLECTIVE = "no collective"
    ABSENT = "absent"


# What each looks like to whoever has to put it right.
MEANING = {
    Link.UNRESOLVED: "the name does not resolve here: check DNS or /etc/hosts",
    Link.REFUSED: "the host answers but rejects the port: a firewall that rejects, or another host",
    Link.UNREACHABLE: "no route to the host: a network or an interface that is down or separate",
    Link.SILENT: "packets vanish: a firewall that drops them, or a host that is down",
    Link.NO_COLLECTIVE: "TCP connects but the collective does not end: it uses other ports or "
    "another interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, NCCL_IB_HCA)",
    Link.ABSENT: "the rank did not start, or cannot reach the first one: see its own message",
    Link.SLOW: "much slower than other pairs of its kind or than expected: a bad cable or NIC, or "
    "traffic over the wrong interface",
}


class NoMeeting(RuntimeError):
    """This rank did not reach the first one: says what the way there looks like."""


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
    is_within_host: bool = True

    def __str__(self) -> str:
        words = f"ranks {self.source} -> {self.target} ({self.host}:{self.port}): {self.link}"
        if self.gb_s is not None:
            words += f", {self.gb_s:.2f} GB/s"
        after = f" after {self.seconds:.1f} s" if self.gb_s is None else ""
        detail = f" ({self.detail})" if self.detail else ""
        meaning = MEANING.get(self.link)
        return f"{words}{after}; {meaning}{detail}" if meaning else words


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


def mark_slow(
    results: Sequence[PairResult], expected_gb_s: float | None = None
) -> list[PairResult]:
    """Pairs below half of the median speed of their kind (within a host, between hosts) are slow,
    and those between hosts below `expected_gb_s`: where all links are bad, none stands out."""
    speeds: defaultdict[bool, list[float]] = defaultdict(list)
    for r in results:
        if r.gb_s is not None:
            speeds[r.is_within_host].append(r.gb_s)
    bounds = {kind: SLOW_SHARE * statistics.median(found) for kind, found in speeds.items()}
    if expected_gb_s is not None and False in bounds:
        bounds[False] = max(bounds[False], expected_gb_s)
    return [
        replace(r, link=Link.SLOW)
        if r.gb_s is not None and r.gb_s < bounds[r.is_within_host]
        else r
        for r in results
    ]


def summary(results: Sequence[PairResult]) -> list[str]:
    """How many pairs are good, and how fast those of each kind are."""
    good = sum(r.link is Link.GOOD for r in results)
    lines = [f"{good} of {len(results)} pairs of ranks are good"]
    for is_within_host, words in ((True, "within a host"), (False, "between hosts")):
        speeds = [
            r.gb_s for r in results if r.gb_s is not None and r.is_within_host is is_within_host
        ]
        if speeds:
            lines.append(
                f"{words}: {len(speeds)} pairs, slowest {min(speeds):.2f} GB/s, "
                f"median {statistics.median(speeds):.2f} GB/s"
            )
    return lines


def probe_links(expected_gb_s: float | None = None, meet_s: float = MEET_S) -> list[PairResult]:
    """Looks at the links of all ranks that a launcher has started, which call it alike; the
    results on rank 0, nothing elsewhere.

    Raises:
        NoMeeting: this rank cannot reach the first one.
    """
    torch.set_num_threads(1)
    # Only so does a collective over NCCL end in an error here, instead of in the whole process.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store = _meet(meet_s)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Preflight(store, rank, world_size, local_host(), meet_s=meet_s).run(expected_gb_s)


def _meet(meet_s: float) -> dist.Store:
    """The store of all ranks, once the way there has been tried: a connection that does not come
    about says why, a store that does not answer says nothing."""
    rank, host, port = (os.environ[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves one
    is_master = rank == "0" and not has_agent
    if not is_master:
        reach(host, int(port), int(rank), meet_s)
    timeout = timedelta(seconds=meet_s)
    # Not torch's own rendezvous, which fails everywhere if one rank is missing.
    return dist.TCPStore(
        host, int(port), is_master=is_master, wait_for_workers=False, timeout=timeout
    )


def reach(host: str, port: int, rank: int, meet_s: float) -> None:
    """Try until the first rank listens, at most `meet_s` seconds. Raises NoMeeting."""
    start = time.monotonic()
    while True:
        link, detail = try_connect(host, port, min(CONNECT_S, meet_s))
        if link is Link.GOOD:
            return
        elapsed_s = time.monotonic() - start
        if elapsed_s + RETRY_S > meet_s:
            raise NoMeeting(
                f"rank {rank} on {os.uname().nodename} -> first rank ({host}:{port}): {link} "
                f"after {elapsed_s:.0f} s; {MEANING[link]} ({detail})"
            )
        time.sleep(RETRY_S)


@dataclass(frozen=True)
class _Place:
    """Where a rank listens, and on which machine it is."""

    host: str
    port: int
    machine: str


class Preflight:
    """One of `world_size` ranks that have `store` in common. Others reach it as `host`."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        host: str,
        *,
        meet_s: float = MEET_S,
        connect_s: float = CONNECT_S,
        collective_s: float = COLLECTIVE_S,
    ) -> None:
        self._store = dist.PrefixStore("preflight", store)
        self._rank = rank
        self._world_size = world_size
        self._host = host
        self._meet_s = meet_s
        self._connect_s = connect_s
        self._collective_s = collective_s
        self._store.set_timeout(timedelta(seconds=2 * meet_s + self._round_s))

    @property
    def _round_s(self) -> float:
        """The longest that a pair can take: both of its ranks join, and move data."""
        return self._connect_s + 2 * self._collective_s

    def run(self, expected_gb_s: float | None = None) -> list[PairResult]:
        """Tries all pairs. The results on rank 0, in order; nothing elsewhere."""
        with closing(socket.create_server(("", 0), backlog=self._world_size)) as listener:
            places = self._exchange(listener.getsockname()[1])
            results = []
            for number, pairs in enumerate(rounds_of_pairs(self._world_size)):
                mine = next((pair for pair in pairs if self._rank in pair), None)
                if mine is not None and (found := self._try_pair(mine, places)):
                    results.append(found)
                self._barrier(number, sum(place is not None for place in places))
        self._store.set(f"results/{self._rank}", json.dumps([asdict(r) for r in results]))
        if self._rank:
            return []
        everyone = [
            PairResult(**(values | {"link": Link(values["link"])}))
            for rank, place in enumerate(places)
            if place is not None
            for values in json.loads(self._store.get(f"results/{rank}"))
        ]
        everyone += self._absent(places)
        return mark_slow(sorted(everyone, key=lambda r: (r.source, r.target)), expected_gb_s)

    def _exchange(self, port: int) -> list[_Place | None]:
        """Where each rank listens; None of those that have not come. The first rank decides."""
        mine = _Place(self._host, port, os.uname().nodename)
        self._store.set(f"place/{self._rank}", json.dumps(asdict(mine)))
        if self._rank == 0:
            deadline = time.monotonic() + self._meet_s
            found = [self._place(rank, deadline) for rank in range(self._world_size)]
            self._store.set("places", json.dumps([place and asdict(place) for place in found]))
        places = json.loads(self._store.get("places"))
        return [None if place is None else _Place(**place) for place in places]

    def _place(self, rank: int, deadline: float) -> _Place | None:
        left_s = max(0.001, deadline - time.monotonic())
        try:
            self._store.wait([f"place/{rank}"], timedelta(seconds=left_s))
        except dist.DistStoreError:
            return None
        return _Place(**json.loads(self._store.get(f"place/{rank}")))

    def _try_pair(
        self, pair: tuple[int, int], places: Sequence[_Place | None]
    ) -> PairResult | None:
        """Both ranks of the pair call it; what the first of them returns counts."""
        source, target = places[pair[0]], places[pair[1]]
        if source is None or target is None:
            return None
        start = time.monotonic()
        verdict = f"verdict/{pair[0]}-{pair[1]}"
        if self._rank == pair[0]:
            link, detail = try_connect(target.host, target.port, self._connect_s)
            self._store.set(verdict, link.value)
        else:
            link, detail = Link(self._store.get(verdict).decode()), ""
        gb_s = None
        if link is Link.GOOD:
            try:
                gb_s = self._measure(pair)
            except RuntimeError as error:
                link, detail = Link.NO_COLLECTIVE, str(error).splitlines()[0]
        if self._rank != pair[0]:
            return None
        return PairResult(
            *pair,
            target.host,
            target.port,
            link,
            time.monotonic() - start,
            gb_s,
            detail,
            is_within_host=source.machine == target.machine,
        )

    def _measure(self, pair: tuple[int, int]) -> float:
        """GB/s of a broadcast between the two, after a small all-reduce. Raises RuntimeError."""
        device = own_device()
        dist.init_process_group(
            wire_backend(),
            store=dist.PrefixStore(f"group/{pair[0]}-{pair[1]}", self._store),
            rank=pair.index(self._rank),
            world_size=2,
            timeout=timedelta(seconds=self._collective_s),
        )
        try:
            dist.all_reduce(torch.ones(1, device=device))
            data = torch.ones(PROBE_BYTES, dtype=torch.uint8, device=device)
            seconds = []
            for _ in range(NUM_PROBES):
                dist.barrier()
                start = time.monotonic()
                dist.broadcast(data, src=0)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.monotonic() - start)
        finally:
            dist.destroy_process_group()
        return PROBE_BYTES / min(seconds) / 1e9

    def _barrier(self, number: int, num_ranks: int) -> None:
        """All ranks have ended a round: pairs of the next one do not disturb those of this one."""
        if self._store.add(f"round/{number}/arrived", 1) == num_ranks:
            self._store.set(f"round/{number}/over", "")
        self._store.wait([f"round/{number}/over"], timedelta(seconds=2 * self._round_s))

    def _absent(self, places: Sequence[_Place | None]) -> list[PairResult]:
        """A result for each rank that has not come, on its way to this, the first one."""
        own = places[self._rank]
        assert own is not None
        return [
            PairResult(rank, 0, own.host, own.port, Link.ABSENT, self._meet_s)
            for rank, place in enumerate(places)
            if place is None
        ]
