"""The lanes of the leaders of other pipeline stages, as rank 0 drives them.

    rank 0            leader of another stage
    Host, Join        Hosted, Joined      its group with all engines
    Open              Ready               an update begins; what is in the first bucket
    Go                Ready               that bucket is on the wire; what is in the next one
                      Sent                it has arrived; after the last one, digests of all
    Leave, Abandon                        the group, and what is on its wire
    Release                               until another update: leaders go on with something else

Control calls to engines are rank 0's alone. A leader does what rank 0 asks, on the thread that
takes part in its stage's collectives, and notices between two looks at its broadcast if rank 0
gives up or is gone: then engines stay paused.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magistral.rollout.engine import ControlTimeouts, UpdateGroup
from megatron_magistral.weights.delivery import Held
from megatron_magistral.weights.gather import Mesh
from megatron_magistral.weights.lane import BucketSource, LaneLost, OwnLane, Specs
from megatron_magistral.weights.link import Link, LinkLost, LinkServer, connect_link
from megatron_magistral.weights.verify import Digests, Views

# How often a leader looks up from its broadcast for a word of rank 0.
LOOK_S = 0.01
# What an answer may take beyond the bound of what it answers.
GRACE_S = 5.0


@dataclass(frozen=True)
class Host:
    world_size: int
    num_parts: int


@dataclass(frozen=True)
class Hosted:
    address: UpdateGroup


@dataclass(frozen=True)
class Join:
    views: Views
    held: Held | None


@dataclass(frozen=True)
class Joined:
    why_not: str


@dataclass(frozen=True)
class Open:
    chosen: frozenset[str]


@dataclass(frozen=True)
class Ready:
    specs: Specs | None


@dataclass(frozen=True)
class Go: ...


@dataclass(frozen=True)
class Sent:
    """`digests` of the whole update, with its last bucket."""

    why_not: str
    digests: Digests


@dataclass(frozen=True)
class Failed:
    """The leader ends; it says why where it still can."""

    why: str


@dataclass(frozen=True)
class Leave: ...


@dataclass(frozen=True)
class Abandon: ...


@dataclass(frozen=True)
class Release: ...


Answer = TypeVar("Answer", Hosted, Joined, Ready, Sent)


def link_leaders(mesh: Mesh, host: str, timeout_s: float) -> list[Link]:
    """On the first stage's leader: links to the others, by stage. On another: one, to the first.

    Collective over the leaders of all stages, and of no other rank. `host` is where they reach
    this one. Raises LinkLost.
    """
    if mesh.pp_size == 1:
        return []
    first = mesh.stage_rank(0)
    if mesh.pp_rank:
        told: list[Any] = [None]
        dist.broadcast_object_list(told, src=first, group=mesh.pp_group)
        return [connect_link(told[0], mesh.pp_rank, timeout_s)]
    server = LinkServer(host)
    try:
        dist.broadcast_object_list([server.address], src=first, group=mesh.pp_group)
        links = server.accept(mesh.pp_size - 1, timeout_s)
    finally:
        server.close()
    return [links[stage] for stage in range(1, mesh.pp_size)]


class PeerLane:
    """Rank 0's end of the lane of another stage, whose leader is trainer rank `rank`."""

    def __init__(self, stage: int, rank: int, link: Link, timeouts: ControlTimeouts) -> None:
        self.stage = stage
        self.rank = rank
        self._link = link
        self._timeouts = timeouts
        self._inbox: deque[Any] = deque()
        self._doing, self._since = "connection", time.monotonic()
        self._address: UpdateGroup | None = None
        self._is_on_wire = False
        self._failure = ""
        self._digests: Digests = {}

    @property
    def group_name(self) -> str:
        assert self._address is not None
        return self._address.name

    def host(self, world_size: int, num_parts: int) -> UpdateGroup:
        self._tell("opening a group", Host(world_size, num_parts))
        self._address = self._answer(Hosted, self._timeouts.join_s).address
        self._inbox.clear()  # of an update that was given up
        return self._address

    def join(self, views: Views, held: Held | None) -> str:
        self._tell("joining its group", Join(views, held))
        return self._answer(Joined, self._timeouts.join_s + GRACE_S).why_not

    def open(self, chosen: frozenset[str]) -> None:
        """An update begins, which takes the digests of `chosen`. Raises LaneLost."""
        self._digests, self._failure, self._is_on_wire = {}, "", False
        self._tell("gathering its first bucket", Open(chosen))

    def next(self) -> Specs | None:
        return self._answer(Ready, self._timeouts.transfer_s).specs

    def start(self) -> None:
        self._tell("sending a bucket", Go())
        self._is_on_wire = True

    def wait(self, timeout_s: float) -> bool:
        if not self._is_on_wire:
            return True
        if not self._has_come(Sent, timeout_s):
            # A leader whose broadcast ran into its bound says so: this one hangs.
            if time.monotonic() - self._since > self._timeouts.transfer_s + GRACE_S:
                self._lost("no word")
            return False
        sent = self._answer(Sent, 0.0)
        self._is_on_wire = False
        self._failure = sent.why_not
        self._digests = sent.digests
        return True

    def failure(self) -> str:
        return f"pipeline stage {self.stage}: {self._failure}" if self._failure else ""

    def digests(self) -> Digests:
        return self._digests

    def check(self, timeout_s: float) -> None:
        try:
            while self._link.poll(timeout_s):
                self._take(self._link.receive(0.0))
        except LinkLost as error:
            self._lost(str(error))

    def leave(self) -> None:
        with suppress(LinkLost):  # a rank that is gone has left, too
            self._link.send(Leave())

    def abandon(self) -> None:
        with suppress(LinkLost):
            self._link.send(Abandon())

    def release(self) -> None:
        """Let the leader's `serve` return."""
        self._tell("going on", Release())

    def _tell(self, doing: str, message: object) -> None:
        self._doing, self._since = doing, time.monotonic()
        try:
            self._link.send(message)
        except LinkLost as error:
            self._lost(str(error))

    def _answer(self, kind: type[Answer], timeout_s: float) -> Answer:
        """The next answer of a kind; others stay for who waits for them."""
        deadline = time.monotonic() + timeout_s
        while not self._has_come(kind, deadline - time.monotonic()):
            if time.monotonic() > deadline:
                self._lost(f"no answer within {timeout_s:g} s")
        answer = next(message for message in self._inbox if isinstance(message, kind))
        self._inbox.remove(answer)
        return answer

    def _has_come(self, kind: type[Answer], timeout_s: float) -> bool:
        if any(isinstance(message, kind) for message in self._inbox):
            return True
        try:
            if self._link.poll(max(0.0, timeout_s)):
                self._take(self._link.receive(0.0))
        except LinkLost as error:
            self._lost(str(error))
        return any(isinstance(message, kind) for message in self._inbox)

    def _take(self, message: object) -> None:
        if isinstance(message, Failed):
            self._lost(message.why)
        self._inbox.append(message)

    def _lost(self, detail: str) -> NoReturn:
        elapsed_s = time.monotonic() - self._since
        raise LaneLost(self.stage, self.rank, self._doing, elapsed_s, detail)


def peer_lanes(mesh: Mesh, links: Sequence[Link], timeouts: ControlTimeouts) -> list[PeerLane]:
    """Rank 0's ends, by stage, over the `links` that `link_leaders` gave it."""
    return [
        PeerLane(stage, mesh.stage_rank(stage), link, timeouts)
        for stage, link in enumerate(links, start=1)
    ]


class Leader:
    """The leader's end. `patience_s` is how long rank 0 may take between two words."""

    def __init__(
        self, lane: OwnLane, link: Link, dtype: torch.dtype | None, patience_s: float
    ) -> None:
        self._lane = lane
        self._link = link
        self._dtype = dtype
        self._patience_s = patience_s

    def serve(self, buckets: Iterable[Sequence[tuple[str, Tensor]]]) -> None:
        """Do what rank 0 asks until it lets go, with `buckets` as what an update sends.

        They are iterated to the end, whatever happens: other ranks of the stage gather them, too.

        Raises:
            LinkLost: rank 0 is gone or silent.
        """
        source = BucketSource(buckets, self._dtype)
        try:
            while not isinstance(message := self._receive(), Release):
                self._do(message, source)
        except LinkLost as error:
            self._lane.abandon()
            raise LinkLost(f"rank 0, which controls weight updates: {error}") from error
        except Exception as error:
            # A worker's edge: rank 0 hears why, before this rank ends with it.
            with suppress(LinkLost):
                self._link.send(Failed(f"{type(error).__name__}: {error}"))
            raise
        finally:
            source.drain()

    def close(self) -> None:
        """Leave the group. The link is its maker's to close."""
        self._lane.leave()

    def _receive(self) -> object:
        return self._link.receive(self._patience_s)

    def _do(self, message: object, source: BucketSource) -> None:
        match message:
            case Host(world_size, num_parts):
                self._lane.leave()  # a group that did not get complete
                self._link.send(Hosted(self._lane.host(world_size, num_parts)))
            case Join(views, held):
                self._link.send(Joined(self._lane.join(views, held)))
            case Open(chosen):
                self._lane.open(source, chosen)
                self._link.send(Ready(self._lane.next()))
            case Go():
                self._send_bucket()
            case Leave():
                self._lane.leave()
            case Abandon():
                self._lane.abandon()
            case _:
                raise TypeError(f"rank 0 said {message}")

    def _send_bucket(self) -> None:
        self._lane.start()
        following = self._lane.next()
        self._link.send(Ready(following))
        while not self._lane.wait(LOOK_S):
            if self._link.poll(0.0):
                return  # rank 0 gives up or is gone: it has nothing else to say before `Sent`
        digests = self._lane.digests() if following is None else {}
        self._link.send(Sent(self._lane.failure(), digests))
