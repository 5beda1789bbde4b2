"""Two pipeline stages send to fake engines over real gloo groups: order, content, failures.

The other stage's leader is a thread here, or a process where it is to be killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import Tensor

from megatron_magistral.rollout.engine import ControlTimeouts, EngineTimeout, Phase, TensorSpec
from megatron_magistral.weights.checksum import ChecksumSettings
from megatron_magistral.weights.lane import LaneLost, OwnLane
from megatron_magistral.weights.leader import Leader, PeerLane
from megatron_magistral.weights.link import (
    Link,
    LinkAddress,
    LinkLost,
    LinkServer,
    connect_link,
)
from megatron_magistral.weights.transfer import UpdateFailed, WeightSender
from tests.rollout.fake_engine import FakeEngine, Fault
from tests.weights.test_transfer import UPDATE_PATHS, addresses

HOST = "127.0.0.1"
# One tensor a bucket: the first stage has two, the other one three.
STAGES = (("a", "b"), ("c", "d", "e"))
IN_TURN = ["a", "c", "b", "d", "e"]
MANIFEST = [TensorSpec(name, (3, 5), "float32") for name in "abcde"]
LOAD = UPDATE_PATHS[Phase.TRANSFER]
RARELY = ChecksumSettings(sample_stride=1 << 20, full_every=1 << 20)

Buckets = Iterator[list[tuple[str, Tensor]]]
BucketsOf = Callable[[int, float], Buckets]


def buckets_of(stage: int, fill: float) -> Buckets:
    for name in STAGES[stage]:
        yield [(name, torch.full((3, 5), fill + ord(name)))]


class TwoStages:
    """The first stage, and a thread that leads the other one and pulls `other_buckets`."""

    def __init__(
        self, timeouts: ControlTimeouts, other_buckets: BucketsOf, checksums: ChecksumSettings
    ) -> None:
        self.fill = 0.0
        self.leader_error: BaseException | None = None
        self.num_drained = 0
        self._other_buckets = other_buckets
        server = LinkServer(HOST)
        theirs = connect_link(server.address, 1, 5.0)
        self.link = server.accept(1, 5.0)[1]
        server.close()
        self._leader = Leader(OwnLane(HOST, "gloo", timeouts), theirs, None, patience_s=30.0)
        self._thread = threading.Thread(target=self._lead, args=(theirs,))
        self._thread.start()
        peer = PeerLane(1, 1, self.link, timeouts)
        self.sender = WeightSender(
            MANIFEST, backend="gloo", timeouts=timeouts, checksums=checksums, peers=[peer]
        )

    def connect(self, engines: list[FakeEngine]) -> None:
        self.sender.connect(addresses(engines))

    def update(self, version: int) -> None:
        self.fill = version / 3
        self.sender.send(buckets_of(0, self.fill), version)
        self.sender.release()

    def close(self) -> None:
        with suppress(LaneLost):
            self.sender.close()
        self.link.close()
        self._thread.join(30.0)
        assert not self._thread.is_alive()

    def _lead(self, link: Link) -> None:
        try:
            while True:
                self._leader.serve(self._pull())
        except (LinkLost, ValueError) as error:
            self.leader_error = error
        finally:
            self._leader.close()
            link.close()

    def _pull(self) -> Buckets:
        yield from self._other_buckets(1, self.fill)
        self.num_drained += 1


MakeStages = Callable[..., TwoStages]


@pytest.fixture
def make_stages() -> Iterator[MakeStages]:
    made: list[TwoStages] = []

    def make(
        timeouts: ControlTimeouts | None = None,
        other_buckets: BucketsOf = buckets_of,
        checksums: ChecksumSettings | None = None,
    ) -> TwoStages:
        made.append(
            TwoStages(timeouts or ControlTimeouts(), other_buckets, checksums or ChecksumSettings())
        )
        return made[-1]

    yield make
    for stages in made:
        stages.close()


def assert_holds(engine: FakeEngine, version: int) -> None:
    assert engine.version == str(version)
    assert not engine.paused and not engine.session_open
    expected = {n: t for stage in (0, 1) for b in buckets_of(stage, version / 3) for n, t in b}
    assert engine.weights.keys() == expected.keys()
    assert all(torch.equal(engine.weights[name], tensor) for name, tensor in expected.items())


def record_loads(engine: FakeEngine) -> list[str]:
    loaded: list[str] = []
    handle = engine.update_weights_from_distributed

    def record(payload):
        loaded.extend(payload["names"])
        return handle(payload)

    engine.update_weights_from_distributed = record
    return loaded


def test_engines_get_the_tensors_of_both_stages_in_turn(engines, make_stages) -> None:
    stages = make_stages()
    loaded = [record_loads(engine) for engine in engines]
    stages.connect(engines)
    for version in (1, 2, 3):
        stages.update(version)
        for engine in engines:
            assert_holds(engine, version)
    assert loaded == [IN_TURN * 3, IN_TURN * 3]


def test_a_stage_gathers_while_the_bucket_of_another_is_loaded(engines, make_stages) -> None:
    """The engine keeps the first bucket of stage 0 until stage 1 has gathered its second one."""
    gathered = threading.Event()

    def signalling(stage: int, fill: float) -> Buckets:
        for number, bucket in enumerate(buckets_of(stage, fill)):
            if number == 1:
                gathered.set()
            yield bucket

    stages = make_stages(other_buckets=signalling)
    engine = engines[0]
    handle = engine.update_weights_from_distributed
    was_gathered: list[bool] = []

    def slow(payload):
        answer = handle(payload)
        was_gathered.append(gathered.wait(10.0))
        return answer

    engine.update_weights_from_distributed = slow
    stages.connect([engine])
    stages.update(1)
    assert was_gathered[0]
    assert_holds(engine, 1)


def test_a_bucket_of_another_stage_that_an_engine_lost_is_found_out(engines, make_stages) -> None:
    stages = make_stages(checksums=RARELY)
    stages.connect(engines)
    stages.update(1)  # the first one checks all
    engines[0].faults[LOAD] = Fault.LOSE
    engines[0].sound_calls[LOAD] = engines[0].calls.count(LOAD) + IN_TURN.index("d")
    with pytest.raises(UpdateFailed, match=r"engine0: compare checksums.*: [^;]*\bd \(rank 0\)"):
        stages.update(2)
    assert engines[0].paused and engines[0].version == "1"
    assert_holds(engines[1], 2)


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.DIE, Fault.HANG])
@pytest.mark.parametrize("bucket", ["a", "c", "e"])
def test_an_engine_that_misses_a_bucket_of_any_stage_is_named_and_the_rest_goes_on(
    bucket: str, fault: Fault, engines, make_stages
) -> None:
    bad, good = engines
    stages = make_stages(ControlTimeouts(transfer_s=1.0) if fault is Fault.HANG else None)
    stages.connect(engines)
    stages.update(1)
    bad.faults[LOAD] = fault
    bad.sound_calls[LOAD] = bad.calls.count(LOAD) + IN_TURN.index(bucket)
    with pytest.raises(UpdateFailed) as failure:
        stages.update(2)
    stages.sender.release()
    assert {(e.engine, e.phase) for e in failure.value.errors} == {("engine0", Phase.TRANSFER)}
    assert any(isinstance(e, EngineTimeout) for e in failure.value.errors) == (fault is Fault.HANG)
    assert set(failure.value.quarantined) == {"engine0", "engine1"}
    assert good.paused and good.version == "1"
    stages.connect([good])
    stages.update(3)
    assert_holds(good, 3)
    assert stages.leader_error is None


def test_an_engine_that_joins_one_group_and_not_the_other_is_named(engines, make_stages) -> None:
    join = "/init_weights_update_group"
    stages = make_stages(ControlTimeouts(join_s=2.0))
    engines[1].faults[join] = Fault.REFUSE
    engines[1].sound_calls[join] = 1
    with pytest.raises(UpdateFailed, match="engine engine1: join update group failed"):
        stages.connect(engines)
    assert "/destroy_weights_update_group" in engines[1].calls  # of the first stage's group
    engines[1].faults.clear()
    stages.connect(engines)
    stages.update(1)
    for engine in engines:
        assert_holds(engine, 1)


def test_a_leader_that_fails_says_why(engines, make_stages) -> None:
    def failing(stage: int, fill: float) -> Buckets:
        yield from list(buckets_of(stage, fill))[:1]
        raise ValueError("a shard is unwell")

    stages = make_stages(other_buckets=failing)
    stages.connect(engines)
    why = r"sender of pipeline stage 1 \(rank 1\): sending a bucket failed after .*shard is unwell"
    with pytest.raises(LaneLost, match=why):
        stages.update(1)
    assert all(engine.paused and engine.version == "default" for engine in engines)


def test_a_leader_that_hangs_in_its_gather_is_named_within_the_bound(engines, make_stages) -> None:
    go_on = threading.Event()

    def hanging(stage: int, fill: float) -> Buckets:
        go_on.wait(20.0)
        yield from buckets_of(stage, fill)

    stages = make_stages(ControlTimeouts(transfer_s=0.5), hanging)
    stages.connect(engines)
    try:
        with pytest.raises(LaneLost, match=r"first bucket failed after .*: no answer within 0.5 s"):
            stages.update(1)
    finally:
        go_on.set()
    assert not any(engine.paused for engine in engines)  # nothing had begun


def test_a_leader_whose_rank_0_is_gone_says_so_and_drains_its_buckets(engines, make_stages) -> None:
    stages = make_stages()
    stages.connect(engines)
    stages.link.close()
    stages.close()
    assert "rank 0, which controls weight updates" in str(stages.leader_error)
    assert stages.num_drained == 1


def _lead_and_die(address: LinkAddress, num_buckets: int) -> None:
    """Kills itself when so many buckets have been pulled: the one before is on the wire."""

    def dying() -> Buckets:
        for number, bucket in enumerate(buckets_of(1, 1 / 3)):
            if number == num_buckets:
                os.kill(os.getpid(), signal.SIGKILL)
            yield bucket

    lane = OwnLane(HOST, "gloo", ControlTimeouts())
    Leader(lane, connect_link(address, 1, 30.0), None, patience_s=30.0).serve(dying())


@contextmanager
def dying_leader(num_buckets: int) -> Iterator[WeightSender]:
    server = LinkServer(HOST)
    process = multiprocessing.get_context("forkserver").Process(
        target=_lead_and_die, args=(server.address, num_buckets)
    )
    process.start()
    try:
        link = server.accept(1, 60.0)[1]
        peer = PeerLane(1, 1, link, ControlTimeouts())
        with WeightSender(MANIFEST, backend="gloo", peers=[peer]) as sender:
            yield sender
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("num_buckets", [0, 1, 2])
def test_a_leader_that_is_killed_is_named_and_engines_stay_as_they_were(
    num_buckets: int, engines
) -> None:
    with dying_leader(num_buckets) as sender:
        sender.connect(addresses(engines))
        with pytest.raises(
            LaneLost, match=r"sender of pipeline stage 1 \(rank 1\): .* failed after .*connection"
        ):
            sender.send(buckets_of(0, 1 / 3), 1)
        assert not sender.is_connected
    for engine in engines:
        assert engine.version == "default"
        assert engine.paused == (num_buckets > 0)


def test_who_does_not_know_the_token_is_turned_away() -> None:
    server = LinkServer(HOST)
    stranger = socket.create_connection((HOST, server.address.port))
    stranger.sendall(b"\x00\x00\x00\x04spam")
    link = connect_link(server.address, 7, 5.0)
    links = server.accept(1, 5.0)
    assert links.keys() == {7}
    assert stranger.recv(1) == b""
    with pytest.raises(LinkLost, match=r"0 of 1 leaders .* within 0.1 s: none"):
        server.accept(1, 0.1)
    link.send("word")
    assert links[7].receive(1.0) == "word"
    link.close()
    with pytest.raises(LinkLost, match="connection closed"):
        links[7].receive(1.0)
    for each in (stranger, server, links[7]):
        each.close()
