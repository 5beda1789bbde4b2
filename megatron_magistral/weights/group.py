"""A process group between one trainer rank and engines that were started without it.

`torch.distributed.new_group` needs a common parent group; trainer and engines have none. SGLang
joins such a group with torch's own helper over a store that the trainer hosts, and so do we: both
sides must give the same prefix and name.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world

from megatron_magistral.rollout.engine import UpdateGroup

POLL_S = 0.0002

_serial = itertools.count()
_abandoned: list[dist.ProcessGroup] = []


class Sending:
    """A broadcast in flight."""

    def __init__(self, work: dist.Work, device: str) -> None:
        self._work: dist.Work | None = work  # until it has ended: it holds what is sent
        self._ended: threading.Event | None = None
        if device == "cpu":
            self._ended = ended = threading.Event()
            work.get_future().add_done_callback(lambda future: ended.set())

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, well or not, at most `timeout_s`; whether it has."""
        if self._ended is not None:
            return self._ended.wait(timeout_s)
        # On a GPU a future ends when the broadcast is queued: only the work knows.
        deadline = time.monotonic() + timeout_s
        while self._work is not None and not self._work.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def failure(self) -> str:
        """Why a broadcast that has ended failed; empty if it did not."""
        work, self._work = self._work, None
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            return f"broadcast failed: {error}"
        return ""


def host_group(host: str, world_size: int, backend: str, timeout_s: float) -> HostedGroup:
    """Open the store of a new group on a free port; engines may join from now on."""
    # Not `rendezvous(tcp://...)`: under torchrun that makes a client of the launcher's store.
    store = dist.TCPStore(
        host,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    name = f"magistral-weights-{os.getpid()}-{next(_serial)}"
    return HostedGroup(UpdateGroup(name, host, store.port, world_size, backend), store, timeout_s)


class HostedGroup:
    """The trainer's end (rank 0) of an update group."""

    def __init__(self, address: UpdateGroup, store: dist.TCPStore, timeout_s: float) -> None:
        self.address = address
        self._store: dist.TCPStore | None = store
        self._timeout = timedelta(seconds=timeout_s)
        self._process_group: dist.ProcessGroup | None = None
        self._sending: Sending | None = None

    def join(self) -> None:
        """Complete the group, once; returns when every engine rank is in it.

        Raises:
            RuntimeError: an engine rank did not come within the timeout.
        """
        address = self.address
        assert self._store is not None, "this group was left"
        process_group, _ = _new_process_group_helper(
            address.world_size,
            0,
            [],
            dist.Backend(address.backend),
            dist.PrefixStore(address.name, self._store),
            group_name=GroupName(address.name),
            timeout=self._timeout,
        )
        _world.pg_group_ranks[process_group] = {rank: rank for rank in range(address.world_size)}
        self._process_group = process_group

    def broadcast(self, data: Tensor, timeout_s: float) -> Sending:
        """Start sending `data` to all engine ranks; fails if it takes longer than `timeout_s`."""
        assert self._process_group is not None, "join first"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        work = self._process_group.broadcast([data], options)
        self._sending = Sending(work, data.device.type)
        return self._sending

    def leave(self) -> None:
        """Destroy our end while nothing is in flight; engines still joining fail at once."""
        self._store = None
        if self._process_group is not None:
            dist.destroy_process_group(self._process_group)
            self._process_group = None

    def abandon(self) -> None:
        """Give up the group without waiting for a broadcast that is in flight.

        NCCL aborts. gloo cannot, and to destroy its group is to wait for the broadcast: the group
        is kept aside, and the broadcast ends by itself at its timeout. Where none is in flight,
        the connections are closed, so that an engine that waits for the next one fails at once.
        """
        if self._process_group is None:
            return
        if self._sending is None or self._sending.wait(0.0):
            self.leave()
            return
        self._process_group.abort()
        _abandoned.append(self._process_group)
        self._process_group = None
