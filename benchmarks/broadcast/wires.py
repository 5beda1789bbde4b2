"""The wires of an update with nothing around them: what a bare broadcast goes over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_magistral.weights.store_group import Channels


@dataclass(frozen=True)
class BareWires:
    """What this rank shares with sender and engines, of each part that it sends or receives."""

    groups: Sequence[dist.ProcessGroup]
    channels: Sequence[Channels]

    def send(self, buffer: Tensor, timeout_s: float, *, channels: bool) -> list[dist.Work]:
        """Start to send a share of `buffer` [bytes] as each part."""
        shares = buffer.split(len(buffer) // len(self.groups))
        if channels:
            sent = zip(shares, self.channels, strict=False)
            return [work for share, part in sent for work in part.send(share, timeout_s)]
        works: list[dist.Work] = []
        for share, group in zip(shares, self.groups, strict=False):
            work = dist.broadcast(share, src=0, group=group, async_op=True)
            assert work is not None
            works.append(work)
        return works

    def receive(self, buffer: Tensor, timeout_s: float, *, channels: bool) -> None:
        """Take this rank's one part."""
        if not channels:
            dist.broadcast(buffer, src=0, group=self.groups[0])
            return
        for work in self.channels[0].receive(buffer, timeout_s):
            work.wait()
