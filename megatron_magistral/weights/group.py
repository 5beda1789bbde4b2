"""The trainer's end of a group with engines that were started without it (see store_group.py).

Over one store there may be several groups, one for each part that goes to other engine ranks. To
whoever sends they are one.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from megatron_magistral.rollout.engine import UpdateGroup
from megatron_magistral.weights.store_group import Channels, broadcast, join_at_store, part_name

POLL_S = 0.0002

_serial = itertools.count()
_abandoned: list[dist.ProcessGroup] = []


class Sending:
    """Operations in flight together; on a CPU each may take `timeout_s`."""

    def __init__(self, works: Sequence[dist.Work], device: str, timeout_s: float) -> None:
        self._works = list(works)  # until they have ended: they hold what is sent
        self._timeout = timedelta(seconds=timeout_s)
        self._failure = ""
        self._ended: threading.Event | None = None
        if device == "cpu":
            self._ended = threading.Event()
            threading.Thread(target=self._end, name="weights-sending", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all have ended, well or not, at most `timeout_s`; whether they have."""
        if self._ended is not None:
            return self._ended.wait(timeout_s)
        # On a GPU to wait for a work is to queue behind it: only the work itself knows.
        deadline = time.monotonic() + timeout_s
        while not all(work.is_completed() for work in self._works):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def failure(self) -> str:
        """Why the first of those that have ended badly failed; empty if none did."""
        if self._ended is None:
            self._wait_for_works()
        return self._failure

    def _end(self) -> None:
        assert self._ended is not None
        self._wait_for_works()
        self._ended.set()

    def _wait_for_works(self) -> None:
        works, self._works = self._works, []
        for work in works:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                self._failure = self._failure or f"broadcast failed: {error}"


def host_group(
    host: str, world_size: int, backend: str, timeout_s: float, num_parts: int = 0
) -> HostedGroup:
    """Open the store of a new group on a free port; engines may join from now on.

    With `num_parts` it is so many groups of that size, one for each part (`part_name`), and
    each of these may be several (`Channels`).
    """
    # Not `rendezvous(tcp://...)`: under torchrun that makes a client of the launcher's store.
    store = dist.TCPStore(
        host,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    # Engines leave the group of an earlier number when they join that of a later one.
    name = f"magistral-weights-{os.getpid()}-{next(_serial)}"
    address = UpdateGroup(name, host, store.port, world_size, backend)
    return HostedGroup(address, store, num_parts, timeout_s)


class HostedGroup:
    """The trainer's end (rank 0) of an update group."""

    def __init__(
        self, address: UpdateGroup, store: dist.TCPStore, num_parts: int, timeout_s: float
    ) -> None:
        self.address = address
        self._store: dist.TCPStore | None = store
        self._num_parts = num_parts
        self._timeout_s = timeout_s
        self._parts: list[Channels] = []
        """Of one group, where it has no parts."""
        self._sending: Sending | None = None

    def join(self) -> None:
        """Complete the group, once; returns when every engine rank is in it.

        Raises:
            RuntimeError: an engine rank did not come within the timeout.
        """
        address = self.address
        assert self._store is not None, "this group was left"
        size, backend, timeout_s = address.world_size, address.backend, self._timeout_s
        if not self._num_parts:
            group = join_at_store(self._store, address.name, 0, size, backend, timeout_s)
            self._parts.append(Channels([group]))
        for number in range(self._num_parts):
            name = part_name(address.name, number)
            self._parts.append(Channels.join(self._store, name, 0, size, backend, timeout_s))

    def broadcast(self, data: Tensor, timeout_s: float) -> Sending:
        """Start sending `data` to all engine ranks; fails if it takes longer than `timeout_s`."""
        (group,) = self._groups()
        return self._start([broadcast(group, data, timeout_s)], data.device.type, timeout_s)

    def send(self, pieces: Iterable[tuple[int, Tensor]], timeout_s: float) -> Sending:
        """Start sending each (number, bytes) to the engine ranks in the group of that number, in
        this order; what takes longer than `timeout_s` fails."""
        works: list[dist.Work] = []
        device = "cpu"
        for number, data in pieces:
            works += self._parts[number].send(data, timeout_s)
            device = data.device.type
        return self._start(works, device, timeout_s)

    def _start(self, works: Sequence[dist.Work], device: str, timeout_s: float) -> Sending:
        self._sending = Sending(works, device, timeout_s)
        return self._sending

    def leave(self) -> None:
        """Destroy our end while nothing is in flight; engines still joining fail at once."""
        self._store = None
        parts, self._parts = self._parts, []
        for part in parts:
            part.leave()

    def abandon(self) -> None:
        """Give up the group without waiting for a broadcast that is in flight.

        NCCL aborts. gloo cannot, and to destroy its group is to wait for the broadcast: the group
        is kept aside, and the broadcast ends by itself at its timeout. Where none is in flight,
        the connections are closed, so that an engine that waits for the next one fails at once.
        """
        if self._sending is None or self._sending.wait(0.0):
            self.leave()
            return
        for group in self._groups():
            group.abort()
        _abandoned.extend(self._groups())
        self._parts = []

    def _groups(self) -> list[dist.ProcessGroup]:
        return [group for part in self._parts for group in part.groups]
