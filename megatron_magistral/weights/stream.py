"""The buckets of one update on their way: gathered, sent and loaded at the same time.

    stage 0   gather 0 | gather 2                              | gather 4 ...
    stage 1   gather 1 |                   | gather 3          | ...
    wire               | broadcast 0       | broadcast 1       | broadcast 2 | ...
    engine             | receive 0, load 0 | receive 1, load 1 | ...

Each pipeline stage has a lane of its own; they take turns, one bucket each, as long as they have
any. A stage gathers its next bucket while its last one or another stage's is on the wire.

An engine takes buckets in the order of the calls that announce them. Two calls on two connections
can overtake each other, and a bucket could be taken for another of the same size: so a bucket is
announced once the one before has left the wire. Its call then waits at the engine while that one
is loaded (its bound counts from then on), so that no round trip is felt. Were calls swapped all the
same, the digests that every update reads back of a tensor of each bucket would tell.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from megatron_magistral.rollout.engine import EngineError, Phase
from megatron_magistral.weights.delivery import Delivery
from megatron_magistral.weights.engine_set import EngineSet, PendingCalls
from megatron_magistral.weights.lane import Lane, Specs
from megatron_magistral.weights.verify import Digests, Verifier

# One call that an engine works on, and one that waits there for its turn.
MAX_CALLS = 2
# How often a broadcast that goes on is compared with what engines have answered meanwhile.
LOOK_S = 0.01
# How long engines get to report, once one has broken a transfer or a connection.
REPORT_GRACE_S = 5.0
# How long a rank that sends may take to be known as dead, once engines miss its bytes.
LOST_GRACE_S = 0.5


class TransferBroken(RuntimeError):
    """A transfer that cannot go on: `errors` of engines, and what this rank saw, if anything."""

    def __init__(self, errors: Sequence[EngineError], why: str = "") -> None:
        super().__init__(why)
        self.errors = tuple(errors)
        self.why = why


class BucketStream:
    """Moves what is in `lanes` to all engines. All methods raise LaneLost."""

    def __init__(
        self, lanes: Sequence[Lane], engines: EngineSet, delivery: Delivery, verifier: Verifier
    ) -> None:
        self._lanes = lanes
        self._engines = engines
        self._delivery = delivery
        self._verifier = verifier
        self._calls: deque[PendingCalls] = deque()
        self._first: dict[Lane, Specs] = {}
        self.num_buckets = 0
        self.num_bytes = 0

    def prepare(self) -> str:
        """Make the first bucket of every lane ready. Why that is not all right, or nothing."""
        for lane in self._lanes:
            specs = lane.next()
            if specs is None:
                continue
            if stranger := self._verifier.stranger(specs):
                return stranger
            self._first[lane] = specs
        return "" if self._first else "no buckets"

    def run(self) -> None:
        """Send all buckets; returns when every engine has loaded the last one.

        Raises:
            TransferBroken: an engine failed, a bucket is not in the manifest, or one was missing.
        """
        for lane, specs in self._turns():
            self._await_wires()
            self._await_calls(MAX_CALLS - 1)
            self._announce(lane, specs)
            lane.start()
            self.num_buckets += 1
            self.num_bytes += num_bytes(specs)
        self._await_wires()
        self._await_calls(0)
        digests: Digests = {}
        for lane in self._lanes:
            digests |= lane.digests()
        if unsent := self._verifier.unsent():
            raise TransferBroken([], f"never sent: {unsent}")
        self._verifier.expect(digests)

    def _turns(self) -> Iterator[tuple[Lane, Specs]]:
        """Every bucket, in the order of the engines; made ready when its turn comes."""
        turns = deque(self._first)
        while turns:
            lane = turns.popleft()
            specs = self._first.pop(lane, None) or lane.next()
            if specs is not None:
                yield lane, specs
                turns.append(lane)

    def _announce(self, lane: Lane, specs: Specs) -> None:
        if stranger := self._verifier.stranger(specs):
            raise TransferBroken([], stranger)
        self._verifier.sent(specs)
        receive = partial(self._delivery.receive, specs=specs, group_name=lane.group_name)
        self._calls.append(self._engines.start(Phase.TRANSFER, receive))

    def _await_calls(self, most: int) -> None:
        """Wait until at most so many calls have no answer."""
        while len(self._calls) > most:
            while not self._calls[0].settled(LOOK_S):
                self._check_lanes()
            if self._calls[0].failures():
                raise self._broken()
            self._calls.popleft()

    def _await_wires(self) -> None:
        """Wait for the broadcast, but not for one that an engine has already given up."""
        for lane in self._lanes:
            while not lane.wait(LOOK_S):
                self._check_lanes()
                if any(calls.failures() for calls in self._calls):
                    raise self._broken("broadcast given up")
            if why := lane.failure():
                raise self._broken(why)

    def _check_lanes(self, grace_s: float = 0.0) -> None:
        deadline = time.monotonic() + grace_s
        for lane in self._lanes:
            lane.check(max(0.0, deadline - time.monotonic()))

    def _broken(self, why: str = "") -> TransferBroken:
        """What was the first to fail; what follows from it is left out."""
        failures = next((found for calls in self._calls if (found := calls.failures())), [])
        if not failures:  # the first call may have been answered, and the next one not yet
            reports = (calls.wait_for_failure(REPORT_GRACE_S) for calls in self._calls)
            failures = next((found for found in reports if found), [])
        self._check_lanes(LOST_GRACE_S)  # engines are not to blame for bytes that nobody sends
        return TransferBroken(failures, why)


def num_bytes(specs: Specs) -> int:
    return sum(torch.Size(s.shape).numel() * getattr(torch, s.dtype).itemsize for s in specs)
