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
from megatron_magistral.weights.store_group import join_at_store, part_name

POLL_S = 0.0002

_serial = itertools.count()
_abandoned: list[dist.ProcessGroup] = []


class Sending:
    """Broadcasts in flight together."""

    def __init__(self, works: Sequence[dist.Work], device: str) -> None:
        self._works = list(works)  # until they have ended: they hold what is sent
        self._ended: threading.Event | None = None
        if device == "cpu":
            self._ended = threading.Event()
            self._lock = threading.Lock()
            self._num_left = len(self._works)
            if not works:
                self._ended.set()
            for work in works:
                work.get_future().add_done_callback(self._one_has_ended)

    def _one_has_ended(self, future: object) -> None:
        assert self._ended is not None
        with self._lock:
            self._num_left -= 1
            if not self._num_left:
                self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all have ended, well or not, at most `timeout_s`; whether they have."""
        if self._ended is not None:
            return self._ended.wait(timeout_s)
        # On a GPU a future ends when the broadcast is queued: only the work knows.
        deadline = time.monotonic() + timeout_s
        while not all(work.is_completed() for work in self._works):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def failure(self) -> str:
        """Why one of those that have ended failed; empty if none did."""
        works, self._works = self._works, []
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            return f"broadcast failed: {error}"
        return ""


def host_group(
    host: str, world_size: int, backend: str, timeout_s: float, num_parts: int = 0
) -> HostedGroup:
    """Open the store of a new group on a free port; engines may join from now on.

    With `num_parts` it is so many groups of that size, one for each part (`part_name`).
    """
    # Not `rendezvous(tcp://...)`: under torchrun that makes a client of the launcher's store.
    store = dist.TCPStore(
        host,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    name = f"magistral-weights-{os.getpid()}-{next(_serial)}"
    address = UpdateGroup(name, host, store.port, world_size, backend)
    names = [part_name(name, rank) for rank in range(num_parts)] or [name]
    return HostedGroup(address, store, names, timeout_s)


class HostedGroup:
    """The trainer's end (rank 0) of an update group."""

    def __init__(
        self, address: UpdateGroup, store: dist.TCPStore, names: Sequence[str], timeout_s: float
    ) -> None:
        self.address = address
        self._store: dist.TCPStore | None = store
        self._names = tuple(names)
        self._timeout_s = timeout_s
        self._groups: list[dist.ProcessGroup] = []
        self._sending: Sending | None = None

    def join(self) -> None:
        """Complete the group, once; returns when every engine rank is in it.

        Raises:
            RuntimeError: an engine rank did not come within the timeout.
        """
        address = self.address
        assert self._store is not None, "this group was left"
        for name in self._names:
            group = join_at_store(
                self._store, name, 0, address.world_size, address.backend, self._timeout_s
            )
            self._groups.append(group)

    def send(self, pieces: Iterable[tuple[int, Tensor]], timeout_s: float) -> Sending:
        """Start sending each (number, bytes) to the engine ranks in the group of that number, in
        this order; what takes longer than `timeout_s` fails."""
        assert self._groups, "join first"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        works, device = [], "cpu"
        for number, data in pieces:
            works.append(self._groups[number].broadcast([data], options))
            device = data.device.type
        self._sending = Sending(works, device)
        return self._sending

    def leave(self) -> None:
        """Destroy our end while nothing is in flight; engines still joining fail at once."""
        self._store = None
        groups, self._groups = self._groups, []
        for group in groups:
            dist.destroy_process_group(group)

    def abandon(self) -> None:
        """Give up the group without waiting for a broadcast that is in flight.

        NCCL aborts. gloo cannot, and to destroy its group is to wait for the broadcast: the group
        is kept aside, and the broadcast ends by itself at its timeout. Where none is in flight,
        the connections are closed, so that an engine that waits for the next one fails at once.
        """
        if self._sending is None or self._sending.wait(0.0):
            self.leave()
            return
        for group in self._groups:
            group.abort()
        _abandoned.extend(self._groups)
        self._groups = []
