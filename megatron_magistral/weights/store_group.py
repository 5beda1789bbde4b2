"""A process group of processes that were started without each other: they meet at a store.

`torch.distributed.new_group` needs a common parent group; trainer and engines have none. SGLang
joins such a group with torch's own helper, and so do we: all sides must give the same name.

It needs nothing but torch: SGLang's own processes use it, too.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world


def join_at_store(
    store: dist.Store, name: str, rank: int, world_size: int, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """The group `name` of so many ranks; returns when all are there.

    Raises:
        RuntimeError: one did not come within the timeout.
    """
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(backend),
        dist.PrefixStore(name, store),
        group_name=GroupName(name),
        timeout=timedelta(seconds=timeout_s),
    )
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def part_name(name: str, rank: int) -> str:
    """Of the group, among those called `name`, for what the engines' ranks number `rank` hold."""
    return f"{name}/{rank}"


def broadcast(group: dist.ProcessGroup, data: Tensor, timeout_s: float) -> dist.Work:
    """Start to bring `data` from rank 0 to all others, which call this, too."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=timeout_s)
    return group.broadcast([data], options)


def send_run(group: dist.ProcessGroup, data: Tensor, timeout_s: float) -> list[dist.Work]:
    """Start to bring one of many runs from rank 0 to all others, which call `receive_run`.

    On a CPU each gets it by itself: several broadcasts of gloo under way together take 1.4 to 1.6
    times as long as one of all bytes (runs of 2 to 32 MiB), sends no longer. Such a send ends only
    while somebody waits for it.
    """
    if data.device.type == "cpu":
        return [group.send([data], rank, 0) for rank in range(1, group.size())]
    return [broadcast(group, data, timeout_s)]


def receive_run(group: dist.ProcessGroup, data: Tensor, timeout_s: float) -> dist.Work:
    """The other end of `send_run`; wait for it with this timeout."""
    if data.device.type == "cpu":
        return group.recv([data], 0, 0)
    return broadcast(group, data, timeout_s)
