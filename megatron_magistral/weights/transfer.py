"""New weights into running SGLang servers, in place and in the middle of generation.

Runs on trainer rank 0, which alone speaks to engines. What it holds it sends itself; the leader of
every other pipeline stage sends what that stage holds, over a group of its own, when rank 0 says
so (leader.py). Other trainer ranks only take part in gathering. Order of an update:

    gather first buckets   generation runs
    pause, begin           on every engine; a paused request keeps its KV cache
    for each bucket        broadcast and load, see stream.py; the next is gathered meanwhile
    compare checksums      of what arrived with what was sent
    stamp, end, resume     the version is set only once every bucket has been loaded and checked

HTTP runs on a thread of its own, collectives on the caller's. An engine that fails is named with
its phase and time, and an engine whose weights may be partial or wrong is never resumed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from megatron_magistral.rollout.engine import (
    ControlTimeouts,
    EngineControl,
    EngineError,
    EngineTimeout,
    Phase,
    TensorSpec,
)
from megatron_magistral.weights.buffers import TurnBuffers
from megatron_magistral.weights.checksum import ChecksumSettings
from megatron_magistral.weights.delivery import DELIVERIES, Delivery, EngineAddress, Gathered, Held
from megatron_magistral.weights.engine_set import EngineSet, Step
from megatron_magistral.weights.lane import BucketSource, Lane, LaneLost, OwnLane
from megatron_magistral.weights.leader import PeerLane
from megatron_magistral.weights.manifest import Layout, place
from megatron_magistral.weights.settings import PlanKind
from megatron_magistral.weights.stream import REPORT_GRACE_S, BucketStream, TransferBroken
from megatron_magistral.weights.verify import Verifier, Views


@dataclass(frozen=True)
class UpdateTimings:
    """Seconds of one update. `pause_s` is all that generation felt.

    prepare_s   first bucket of every stage gathered and flattened, before the pause
    pause_s     from the first pause call to the last resume answer
    transfer_s  from the first broadcast to the last bucket loaded, part of the pause
    checksum_s  reading back the digests of `num_checked` tensors, part of the pause
    gather_s    gathering and flattening this rank's later buckets, hidden behind the wire while
                smaller
    """

    version: int
    num_buckets: int
    num_bytes: int
    prepare_s: float
    pause_s: float
    transfer_s: float
    checksum_s: float
    gather_s: float
    num_checked: int

    @property
    def total_s(self) -> float:
        return self.prepare_s + self.pause_s


class UpdateFailed(RuntimeError):
    """Engines could not be connected or did not get an update.

    `errors` says which engine failed, in which phase and when. Engines in `quarantined` may hold
    partial or wrong weights or have missed a phase: they are left paused and need a full update,
    after `connect`, before any traffic. Those in `updated` serve the new version. All others
    serve the one before: the update broke off before the transfer.
    """

    def __init__(
        self,
        doing: str,
        errors: Sequence[EngineError],
        quarantined: Sequence[str],
        why: str = "",
        updated: Sequence[str] = (),
    ) -> None:
        reasons = "; ".join([*(str(error) for error in errors), *([why] if why else [])])
        names = ", ".join(quarantined) or "none"
        super().__init__(f"{doing}: {reasons}; quarantined: {names}")
        self.errors = tuple(errors)
        self.quarantined = tuple(quarantined)
        self.updated = tuple(updated)


class WeightSender:
    """Sends versions of the weights from this process, and from `peers`, to a set of engines.

    `peers` are the leaders of the other pipeline stages, in their order; they must be serving while
    `connect` or `send` runs, until `release`. `manifest` names every tensor that an update consists
    of. `host` is the address of this process as engines reach it. `dtype` is what engines compute
    in; tensors are converted while they are flattened. `plan` says who gets what, see delivery.py;
    `packing` is as in `OwnLane`. Use it as a context manager or call `close`.
    """

    def __init__(
        self,
        manifest: Sequence[TensorSpec],
        *,
        backend: str,
        host: str = "127.0.0.1",
        dtype: torch.dtype | None = None,
        timeouts: ControlTimeouts | None = None,
        checksums: ChecksumSettings | None = None,
        peers: Sequence[PeerLane] = (),
        plan: PlanKind = PlanKind.GATHER,
        packing: TurnBuffers | None = None,
    ) -> None:
        self._manifest = tuple(manifest)
        self._checksums = checksums or ChecksumSettings()
        self._dtype = dtype
        self._timeouts = timeouts or ControlTimeouts()
        self._own = OwnLane(host, backend, self._timeouts, packing)
        self._peers = tuple(peers)
        self._lanes: tuple[Lane, ...] = (self._own, *self._peers)
        self._make_delivery = DELIVERIES[plan]
        self._delivery: Delivery = Gathered([])
        self._engines = EngineSet([])
        self._is_connected = False
        self._verifier = Verifier((), {}, self._checksums)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        """The engines that were connected last."""
        return self._engines.names

    @property
    def is_connected(self) -> bool:
        """Whether there are groups to send over: not before `connect`, nor after a failure."""
        return self._is_connected

    def connect(self, engines: Sequence[EngineAddress]) -> None:
        """Form new groups with exactly these engines; former ones are left first.

        Raises:
            UpdateFailed: an engine is not there, is too old, lacks the plugin, cannot hold exactly
                the tensors of the manifest, or did not join.
            LaneLost: the leader of another stage is gone or silent.
        """
        self.close()
        self._engines = EngineSet(
            [EngineControl(e.url, name=e.name, timeouts=self._timeouts) for e in engines]
        )
        self._require(self._engines.run(Phase.INFO, EngineControl.check_server))
        self._require(self._engines.run(Phase.END, EngineControl.abandon_update))
        self._delivery = self._make_delivery(engines)
        layouts: dict[str, Layout] = {}

        async def compare_manifest(engine: EngineControl) -> None:
            in_place = self._delivery.in_place
            layouts[engine.name] = await place(engine, self._manifest, in_place=in_place)

        self._require(self._engines.run(Phase.MANIFEST, compare_manifest))
        self._verifier = Verifier(self._manifest, layouts, self._checksums)
        try:
            held = self._delivery.held(layouts)
        except ValueError as error:
            raise UpdateFailed("connect", [], self._engines.names, str(error)) from error
        self._join(held)
        self._is_connected = True

    def _join(self, held: Held | None) -> None:
        """One group after the other, in the same order everywhere, so that nobody waits in a ring
        of ranks that each join another one."""
        views = self._verifier.views
        for number, lane in enumerate(self._lanes):
            try:
                self._join_lane(lane, views, held)
            except (UpdateFailed, LaneLost):
                self._leave(self._lanes[:number])
                raise

    def _join_lane(self, lane: Lane, views: Views, held: Held | None) -> None:
        address = lane.host(self._delivery.world_size, self._delivery.num_parts)
        joining = self._engines.start(Phase.JOIN, partial(self._delivery.join, group=address))
        why = lane.join(views, held)
        errors = joining.wait(REPORT_GRACE_S)
        if errors or why:
            lane.leave()
            # An engine that refused made the others wait in vain.
            errors = [e for e in errors if not isinstance(e, EngineTimeout)] or errors
            raise UpdateFailed("connect", errors, self._engines.names, why)

    def send(self, buckets: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> UpdateTimings:
        """Replace the weights of every engine by `buckets` and name them `version`.

        `buckets` are those of this rank's stage; peers have their own. They are always iterated
        to the end, also on failure: other trainer ranks gather them in lockstep and would otherwise
        wait for this one.

        Raises:
            UpdateFailed: see there. The groups are gone then: `connect` again.
            LaneLost: the leader of another stage is gone or silent. Engines are left as they were
                when that was found: paused, once an update had paused them.
        """
        if not self._is_connected:
            raise RuntimeError("WeightSender.send needs a `connect`, also after a failed update")
        source = BucketSource(buckets, self._dtype)
        try:
            return self._update(source, version)
        except LaneLost:
            self._abandon_groups()
            raise
        finally:
            source.drain()

    def release(self) -> None:
        """Let the other stages' leaders go on. Raises LaneLost."""
        for peer in self._peers:
            peer.release()

    def close(self) -> None:
        """Leave the groups and end the control thread. Engines keep what they have."""
        if self._is_connected:
            self._leave(self._lanes)
            self._is_connected = False
        self._engines.close()
        self._engines = EngineSet([])

    def _leave(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            leave = partial(self._delivery.leave, group_name=lane.group_name)
            self._engines.run(Phase.LEAVE, leave)  # an engine that is gone has left, too
            lane.leave()

    def _update(self, source: BucketSource, version: int) -> UpdateTimings:
        begun_at = time.monotonic()
        chosen = self._verifier.begin(version)
        for peer in self._peers:  # they gather while this rank does
            peer.open(chosen)
        self._own.open(source, chosen)
        stream = BucketStream(self._lanes, self._engines, self._delivery, self._verifier)
        if why := stream.prepare():
            raise ValueError(f"update to version {version}: {why}")
        gathered_s = source.busy_s
        paused_at = time.monotonic()
        self._open_sessions(version)
        transfer_at = time.monotonic()
        self._transfer(stream, version)
        checksum_at = time.monotonic()
        compare = partial(self._verifier.compare, version=version)
        wrong = self._engines.run(Phase.CHECKSUM, compare)
        closing_at = time.monotonic()
        self._close_sessions(version, wrong)
        return UpdateTimings(
            version=version,
            num_buckets=stream.num_buckets,
            num_bytes=stream.num_bytes,
            prepare_s=paused_at - begun_at,
            pause_s=time.monotonic() - paused_at,
            transfer_s=checksum_at - transfer_at,
            checksum_s=closing_at - checksum_at,
            gather_s=source.busy_s - gathered_s,
            num_checked=self._verifier.num_checked,
        )

    def _open_sessions(self, version: int) -> None:
        """Pause and begin everywhere, or nowhere: no weight has changed yet."""
        steps: tuple[tuple[Phase, Step], ...] = (
            (Phase.PAUSE, EngineControl.pause),
            (Phase.BEGIN, EngineControl.begin_update),
        )
        for phase, step in steps:
            errors = self._engines.run(phase, step)
            if errors:
                healthy = self._engines.without(errors)
                errors += self._engines.run(Phase.END, EngineControl.abandon_update, healthy)
                healthy = self._engines.without(errors)
                errors += self._engines.run(Phase.RESUME, EngineControl.resume, healthy)
                self._fail(version, errors)

    def _transfer(self, stream: BucketStream, version: int) -> None:
        """Broadcast and load all buckets."""
        try:
            stream.run()
        except TransferBroken as broken:
            self._abandon_groups()
            raise UpdateFailed(
                _doing(version), broken.errors, self._engines.names, broken.why
            ) from broken

    def _close_sessions(self, version: int, wrong: Sequence[EngineError]) -> None:
        """Stamp, end and resume all but those in `wrong`.

        An engine that fails here stays behind; the others go on.
        """
        steps: tuple[tuple[Phase, Step], ...] = (
            (Phase.STAMP, partial(EngineControl.stamp, version=version)),
            (Phase.END, EngineControl.end_update),
            (Phase.RESUME, EngineControl.resume),
        )
        errors = list(wrong)
        for phase, step in steps:
            errors += self._engines.run(phase, step, self._engines.without(errors))
        if errors:
            updated = [engine.name for engine in self._engines.without(errors)]
            self._fail(version, errors, updated)

    def _fail(
        self, version: int, errors: Sequence[EngineError], updated: Sequence[str] = ()
    ) -> None:
        self._abandon_groups()
        quarantined = sorted({error.engine for error in errors})
        raise UpdateFailed(_doing(version), errors, quarantined, updated=updated)

    def _require(self, errors: Sequence[EngineError]) -> None:
        if errors:
            raise UpdateFailed("connect", errors, [error.engine for error in errors])

    def _abandon_groups(self) -> None:
        self._is_connected = False
        for lane in self._lanes:
            lane.abandon()


def _doing(version: int) -> str:
    return f"update to version {version}"
