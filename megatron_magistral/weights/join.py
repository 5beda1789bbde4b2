"""Tensors that are divided over a group of ranks, put together on its first rank alone.

Parts of rows arrive where they belong; parts of columns by way of a scratch of their size. Only
the bytes that the first rank lacks travel, which over gloo, where ranks share the cores, is half
of what an all-gather costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_magistral.weights.buffers import TurnBuffers


@dataclass(frozen=True)
class Divided:
    """`part` is what this rank holds. The parts of all ranks, of equal shapes, follow each other
    along `axis` of `target`, which matters on the first rank; what is beyond its end is padding."""

    part: Tensor
    target: Tensor
    axis: int

    def span(self, rank: int) -> tuple[int, int]:
        """(start, size) of a rank's part along `axis` of the target."""
        step, length = self.part.shape[self.axis], self.target.shape[self.axis]
        start = min(rank * step, length)
        return start, min(step, length - start)

    def piece(self, rank: int) -> Tensor:
        """The place of a rank's part in the target."""
        return self.target.narrow(self.axis, *self.span(rank))


@dataclass
class _OnItsWay:
    """`scratch` holds (place in a target, what arrives for it)."""

    works: list[dist.Work] = field(default_factory=list)
    scratch: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def finish(self) -> None:
        for work in self.works:
            work.wait()
        for place, arrived in self.scratch:
            place.copy_(arrived)


class JoinOnFirst:
    """Fills targets on the first rank of `group`, some tensors at a time. Collective.

    What cannot arrive in its place arrives in `buffers`. Targets may be of another dtype than the
    parts; they must be contiguous.
    """

    def __init__(self, group: dist.ProcessGroup, buffers: TurnBuffers) -> None:
        self._group = group
        self._buffers = buffers
        self._rank = dist.get_rank(group)
        self._last = _OnItsWay()

    def start(self, tensors: Sequence[Divided]) -> None:
        """Begin with these, and finish those before: one step is on its way at a time."""
        following = self._send(tensors) if self._rank else self._receive(tensors)
        self.finish()
        self._last = following

    def finish(self) -> None:
        self._last.finish()
        self._last = _OnItsWay()

    def _send(self, tensors: Sequence[Divided]) -> _OnItsWay:
        ops = []
        for tensor in tensors:
            _, size = tensor.span(self._rank)
            if size:
                part = tensor.part.narrow(tensor.axis, 0, size)
                ops.append(self._op(dist.isend, part.to(tensor.target.dtype).contiguous(), 0))
        return _OnItsWay(dist.batch_isend_irecv(ops) if ops else [])

    def _receive(self, tensors: Sequence[Divided]) -> _OnItsWay:
        others = range(1, self._group.size())
        places = [
            (rank, place)
            for tensor in tensors
            for rank in others
            if (place := tensor.piece(rank)).numel()
        ]
        scratch = self._scratch([place for _, place in places if not place.is_contiguous()])
        elsewhere = iter(scratch)
        ops = [
            self._op(dist.irecv, place if place.is_contiguous() else next(elsewhere)[1], rank)
            for rank, place in places
        ]
        works = dist.batch_isend_irecv(ops) if ops else []
        for tensor in tensors:
            own = tensor.piece(0)
            own.copy_(tensor.part.narrow(tensor.axis, 0, own.shape[tensor.axis]))
        return _OnItsWay(works, scratch)

    def _scratch(self, places: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(place, contiguous memory of the same shape), for places of one dtype."""
        if not places:
            return []
        sizes = [place.numel() for place in places]
        parts = self._buffers.take_each(sizes, places[0].dtype, places[0].device)
        return [(place, part.view(place.shape)) for place, part in zip(places, parts, strict=True)]

    def _op(self, kind: Callable[..., Any], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, dist.get_global_rank(self._group, peer), self._group)
