"""A process group of processes that were started without each other: they meet at a store.

`torch.distributed.new_group` needs a common parent group; trainer and engines have none. SGLang
joins such a group with torch's own helper, and so do we: all sides must give the same name.

It needs nothing but torch: SGLang's own processes use it, too.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
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
