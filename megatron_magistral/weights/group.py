"""A process group between one trainer rank and engines that were started without it.

`torch.distributed.new_group` needs a common parent group; trainer and engines have none. SGLang
joins such a group with torch's own helper over a store that the trainer hosts, and so do we: both
sides must give the same prefix and name.
"""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world

from megatron_magistral.rollout.engine import UpdateGroup

_serial = itertools.count()
_abandoned: list[dist.ProcessGroup] = []


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

    def broadcast(self, data: Tensor, timeout_s: float) -> dist.Work:
        """Start sending `data` to all engine ranks; fails if it takes longer than `timeout_s`."""
        assert self._process_group is not None, "join first"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        return self._process_group.broadcast([data], options)

    def leave(self) -> None:
        """Destroy our end while nothing is in flight; engines still joining fail at once."""
        self._store = None
        if self._process_group is not None:
            dist.destroy_process_group(self._process_group)
            self._process_group = None

    def abandon(self) -> None:
        """Give up the group with a broadcast in flight, without waiting for it.

        NCCL aborts. gloo cannot, and to destroy its group is to wait for the broadcast: the group
        is kept aside, and the broadcast ends by itself at its timeout.
        """
        if self._process_group is not None:
            self._process_group.abort()
            _abandoned.append(self._process_group)
            self._process_group = None
