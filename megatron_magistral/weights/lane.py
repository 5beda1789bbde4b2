"""What one rank sends to the engines: a group with all of them, and its buckets one by one.

The first rank of every pipeline stage has such a lane. Rank 0 drives all of them: its own here,
those of others by way of `leader.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from megatron_magistral.rollout.engine import ControlTimeouts, TensorSpec, UpdateGroup
from megatron_magistral.weights.buffers import TurnBuffers
from megatron_magistral.weights.delivery import Held, pieces
from megatron_magistral.weights.flatten import FlatBucket, LooseBucket, flatten, loosen
from megatron_magistral.weights.group import HostedGroup, Sending, host_group
from megatron_magistral.weights.verify import Digester, Digests, Views

Specs = tuple[TensorSpec, ...]
Named = Sequence[tuple[str, Tensor]]
Bucket = TypeVar("Bucket", FlatBucket, LooseBucket)


class LaneLost(RuntimeError):
    """The rank that sends for a pipeline stage is gone, or does not answer.

    No engine can be updated without it. Engines that were paused stay paused.
    """

    def __init__(self, stage: int, rank: int, doing: str, elapsed_s: float, detail: str) -> None:
        super().__init__(
            f"sender of pipeline stage {stage} (rank {rank}): {doing} failed after "
            f"{elapsed_s:.2f} s: {detail}"
        )
        self.stage = stage
        self.rank = rank


class Lane(Protocol):
    """`host` and `join` make the group. In an update, once it is open on the lane's rank, `next`,
    `start` and `wait` follow each other for every bucket; `next` may come before `wait`.

    All but `leave` and `abandon` raise LaneLost.
    """

    @property
    def group_name(self) -> str: ...

    def host(self, world_size: int, num_parts: int) -> UpdateGroup:
        """Open a group of so many ranks, or one for each part; engines may join from now on."""
        ...

    def join(self, views: Views, held: Held | None) -> str:
        """Complete it; why that failed, or nothing. `views` is what of each tensor engines hold,
        `held` what goes to which of their ranks (see `Delivery.held`)."""
        ...

    def next(self) -> Specs | None:
        """Make the next bucket ready, which must have been started before another one is; what
        is in it. None: there are no more."""
        ...

    def start(self) -> None:
        """Put the bucket that is ready on the wire; none may be there."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for the wire, at most so long; whether nothing is on it."""
        ...

    def failure(self) -> str:
        """Why the broadcast that `wait` has seen end failed; empty if it did not."""
        ...

    def digests(self) -> Digests:
        """Of all that was sent in this update, once nothing is on the wire."""
        ...

    def check(self, timeout_s: float) -> None:
        """Raise LaneLost if the rank is gone, or turns out to be within so long."""
        ...

    def leave(self) -> None:
        """Leave the group while nothing is on the wire."""
        ...

    def abandon(self) -> None:
        """Give up the group, whatever is on the wire."""
        ...


class BucketSource:
    """Pulls buckets, makes them ready and counts the seconds that takes."""

    def __init__(self, buckets: Iterable[Named], dtype: torch.dtype | None) -> None:
        self._iterator: Iterator[Named] = iter(buckets)
        self._dtype = dtype
        self.busy_s = 0.0

    def next(self, make: Callable[[Named, torch.dtype | None], Bucket]) -> Bucket | None:
        """The next bucket, as `make` makes it ready; None: there are no more."""
        start = time.monotonic()
        named = next(self._iterator, None)
        bucket = None if named is None else make(named, self._dtype)
        self.busy_s += time.monotonic() - start
        return bucket

    def drain(self) -> None:
        for _ in self._iterator:
            pass


class OwnLane:
    """The lane of this process. `host_address` is where engines reach it; what has to be packed is
    packed in one of `packing`."""

    def __init__(
        self,
        host_address: str,
        backend: str,
        timeouts: ControlTimeouts,
        packing: TurnBuffers | None = None,
    ) -> None:
        self._host_address = host_address
        self._backend = backend
        self._timeouts = timeouts
        self._group: HostedGroup | None = None
        self._source: BucketSource | None = None
        self._ready: FlatBucket | LooseBucket | None = None
        self._sending: Sending | None = None
        self._digester = Digester({})
        self._held: Held | None = None
        self._packing = packing or TurnBuffers(1)

    @property
    def group_name(self) -> str:
        assert self._group is not None
        return self._group.address.name

    def host(self, world_size: int, num_parts: int) -> UpdateGroup:
        self._group = host_group(
            self._host_address, world_size, self._backend, self._timeouts.join_s, num_parts
        )
        return self._group.address

    def join(self, views: Views, held: Held | None) -> str:
        assert self._group is not None
        self._digester = Digester(views)
        self._held = held
        try:
            self._group.join()
        except RuntimeError as error:
            return f"no complete group within {self._timeouts.join_s:g} s: {error}"
        return ""

    def open(self, source: BucketSource, chosen: frozenset[str]) -> None:
        """An update of what is in `source` begins, which takes the digests of `chosen`."""
        self._source = source
        self._ready = self._sending = None
        self._digester.begin(chosen)

    def next(self) -> Specs | None:
        assert self._source is not None and self._ready is None
        if self._held is None:
            self._ready = self._source.next(flatten)
        else:
            self._ready = self._source.next(loosen)
        return None if self._ready is None else self._ready.specs

    def start(self) -> None:
        assert self._group is not None and self._ready is not None
        bucket, self._ready = self._ready, None
        timeout_s = self._timeouts.transfer_s
        if isinstance(bucket, FlatBucket):
            self._sending = self._group.broadcast(bucket.data, timeout_s)
        else:
            assert self._held is not None
            self._sending = self._group.send(pieces(bucket, self._held, self._packing), timeout_s)
        self._digester.add(bucket)

    def wait(self, timeout_s: float) -> bool:
        return self._sending is None or self._sending.wait(timeout_s)

    def failure(self) -> str:
        sending, self._sending = self._sending, None
        self._packing.rest()
        return "" if sending is None else sending.failure()

    def digests(self) -> Digests:
        return self._digester.values()

    def check(self, timeout_s: float) -> None:
        """This process is here."""

    def leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._forget()

    def abandon(self) -> None:
        if self._group is not None:
            self._group.abandon()
        self._forget()

    def _forget(self) -> None:
        self._group = self._source = self._ready = self._sending = None
