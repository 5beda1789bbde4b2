"""The buckets of one update on their way: gathered, sent and loaded at the same time.

    this rank   gather 0 | gather 1          | gather 2          | ...
    wire                 | broadcast 0       | broadcast 1       | ...
    engine               | receive 0, load 0 | receive 1, load 1 | ...

An engine takes one bucket at a time, in the order of the calls that announce them. The call for the
next bucket waits there while the one before is received and loaded (its bound counts from then on),
so that neither wire nor engine waits for a round trip. SGLang queues calls as they come; were two
buckets of equal shapes taken for each other all the same, the digests that every update reads back
of a tensor of each bucket would tell.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_magistral.rollout.engine import EngineControl, EngineError, Phase
from megatron_magistral.weights.engine_set import EngineSet, PendingCalls
from megatron_magistral.weights.flatten import FlatBucket, flatten
from megatron_magistral.weights.group import HostedGroup, Sending
from megatron_magistral.weights.verify import Verifier

# One call that an engine works on, and one that waits there for its turn.
MAX_CALLS = 2
# How often a broadcast that goes on is compared with what engines have answered meanwhile.
LOOK_S = 0.01
# How long engines get to report, once one has broken a transfer or a connection.
REPORT_GRACE_S = 5.0


class TransferBroken(RuntimeError):
    """A transfer that cannot go on: `errors` of engines, and what this rank saw, if anything."""

    def __init__(self, errors: Sequence[EngineError], why: str = "") -> None:
        super().__init__(why)
        self.errors = tuple(errors)
        self.why = why


class FlatSource:
    """Pulls buckets, flattens them and counts the seconds that takes."""

    def __init__(
        self, buckets: Iterable[Sequence[tuple[str, Tensor]]], dtype: torch.dtype | None
    ) -> None:
        self._iterator: Iterator[Sequence[tuple[str, Tensor]]] = iter(buckets)
        self._dtype = dtype
        self._prepared: FlatBucket | None = None
        self.busy_s = 0.0

    def prepare(self) -> FlatBucket | None:
        """The bucket that `next` will return."""
        self._prepared = self.next()
        return self._prepared

    def next(self) -> FlatBucket | None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            return prepared
        start = time.monotonic()
        named = next(self._iterator, None)
        bucket = None if named is None else flatten(named, self._dtype)
        self.busy_s += time.monotonic() - start
        return bucket

    def drain(self) -> None:
        self._prepared = None
        for _ in self._iterator:
            pass


class BucketStream:
    """Moves what is in `source` to all engines of `group`."""

    def __init__(
        self,
        source: FlatSource,
        group: HostedGroup,
        engines: EngineSet,
        verifier: Verifier,
        transfer_s: float,
    ) -> None:
        self._source = source
        self._group = group
        self._engines = engines
        self._verifier = verifier
        self._transfer_s = transfer_s
        self._calls: deque[PendingCalls] = deque()
        self.num_buckets = 0
        self.num_bytes = 0

    def run(self) -> None:
        """Send all buckets; returns when every engine has loaded the last one.

        Raises:
            TransferBroken: an engine failed, a bucket is not in the manifest, or one was missing.
        """
        bucket = self._source.next()
        if bucket is not None:
            self._announce(bucket)
        while bucket is not None:
            sending = self._group.broadcast(bucket.data, self._transfer_s)
            self._verifier.add(bucket)
            self.num_buckets += 1
            self.num_bytes += bucket.num_bytes
            bucket = self._source.next()
            if bucket is not None:
                self._await_calls(MAX_CALLS - 1)
                self._announce(bucket)
            self._await_wire(sending)
        self._await_calls(0)
        if unsent := self._verifier.unsent():
            raise TransferBroken([], f"never sent: {unsent}")

    def _announce(self, bucket: FlatBucket) -> None:
        if stranger := self._verifier.stranger(bucket):
            raise TransferBroken([], stranger)
        load = partial(
            EngineControl.update_bucket, specs=bucket.specs, group_name=self._group.address.name
        )
        self._calls.append(self._engines.start(Phase.TRANSFER, load))

    def _await_calls(self, most: int) -> None:
        """Wait until at most so many calls have no answer."""
        while len(self._calls) > most:
            if errors := self._calls[0].wait():
                raise TransferBroken(errors)
            self._calls.popleft()

    def _await_wire(self, sending: Sending) -> None:
        """Wait for a broadcast, but not for one that an engine has already given up."""
        while not sending.wait(LOOK_S):
            if any(calls.failures() for calls in self._calls):
                raise self._broken("broadcast given up")
        if why := sending.failure():
            raise self._broken(why)

    def _broken(self, why: str) -> TransferBroken:
        failures = [error for calls in self._calls for error in calls.failures()]
        if not failures and self._calls:
            failures = self._calls[0].wait_for_failure(REPORT_GRACE_S)
        return TransferBroken(failures, why)
