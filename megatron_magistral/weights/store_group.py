"""A process group of processes that were started without each other: they meet at a store.

`torch.distributed.new_group` needs a common parent group; trainer and engines have none. SGLang
joins such a group with torch's own helper, and so do we: all sides must give the same name.

It needs nothing but torch: SGLang's own processes use it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world

NUM_CHANNELS = {"gloo": 2}
PIECE_BYTES = 64 << 20
"""A run is cut where there are several channels, so that a large one keeps none idle."""


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
    """Of the groups, among those called `name`, for what the engines' ranks number `rank` hold."""
    return f"{name}/{rank}"


def channel_names(name: str, backend: str) -> list[str]:
    """Of the groups of the `Channels` called `name`."""
    return [f"{name}/{channel}" for channel in range(NUM_CHANNELS.get(backend, 1))]


def broadcast(group: dist.ProcessGroup, data: Tensor, timeout_s: float) -> dist.Work:
    """Start to bring `data` from rank 0 to all others, which call this, too."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=timeout_s)
    return group.broadcast([data], options)


class Channels:
    """Brings many runs of bytes from rank 0 to all others, over groups side by side.

    gloo keeps one core of the sender busy for each group; a second one uses what receiving leaves
    of another: on 2 cores, with one receiver, both take 0.78 to 0.85 of the time of one. NCCL opens
    channels of its own.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self.groups = tuple(groups)
        self._num_bytes = [0] * len(groups)

    @classmethod
    def join(
        cls,
        store: dist.Store,
        name: str,
        rank: int,
        world_size: int,
        backend: str,
        timeout_s: float,
    ) -> Channels:
        """As `join_at_store`, of several groups: all or none."""
        joined = cls([])
        try:
            for channel in channel_names(name, backend):
                group = join_at_store(store, channel, rank, world_size, backend, timeout_s)
                joined = cls([*joined.groups, group])
        except RuntimeError:
            joined.leave()
            raise
        return joined

    def send(self, data: Tensor, timeout_s: float) -> list[dist.Work]:
        """Start to bring `data` [bytes] from rank 0 to all others, which call `receive` for all
        that is sent, in this order.

        On a CPU each gets it by itself: several broadcasts of gloo under way together take 1.4 to
        1.6 times as long as one of all bytes (runs of 2 to 32 MiB), sends no longer. Such a send
        ends only while somebody waits for it.
        """
        works: list[dist.Work] = []
        for group, piece in self._spread(data):
            if data.device.type == "cpu":
                works += [group.send([piece], rank, 0) for rank in range(1, group.size())]
            else:
                works.append(broadcast(group, piece, timeout_s))
        return works

    def receive(self, data: Tensor, timeout_s: float) -> list[dist.Work]:
        """The other end of `send`; wait for each with this timeout."""
        return [
            group.recv([piece], 0, 0)
            if data.device.type == "cpu"
            else broadcast(group, piece, timeout_s)
            for group, piece in self._spread(data)
        ]

    def leave(self) -> None:
        """While nothing is on its way."""
        for group in self.groups:
            dist.destroy_process_group(group)

    def _spread(self, data: Tensor) -> Iterator[tuple[dist.ProcessGroup, Tensor]]:
        """Each piece over what has had the fewest bytes so far: the same at all ranks."""
        for piece in data.split(PIECE_BYTES) if len(self.groups) > 1 else (data,):
            channel = self._num_bytes.index(min(self._num_bytes))
            self._num_bytes[channel] += piece.nbytes
            yield self.groups[channel], piece
