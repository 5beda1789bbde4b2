"""The two ways in which the bytes of a bucket get into the parameters of engines.

gather   every rank of every engine gets whole tensors, in one group with the sender, and SGLang's
         own loader takes this rank's part of them
direct   every rank gets its own part alone, and our plugin receives it where it belongs: a group
         for each rank number, of the sender and the ranks of that number in all engines
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_magistral.rollout.engine import (
    EngineControl,
    Phase,
    TensorSpec,
    UpdateGroup,
    server_name,
)
from megatron_magistral.weights.buffers import TurnBuffers, as_one
from megatron_magistral.weights.flatten import LooseBucket
from megatron_magistral.weights.manifest import Layout
from megatron_magistral.weights.parts import Part, View, pack, parts_of, runs
from megatron_magistral.weights.settings import PlanKind

# By tensor, then by rank number: what the rank of that number holds of it in any engine.
Held = Mapping[str, Sequence[Sequence[View]]]


@dataclass(frozen=True)
class EngineAddress:
    """One SGLang server of `tp` ranks."""

    url: str
    tp: int = 1
    name: str | None = None

    @property
    def control_name(self) -> str:
        """What errors and statuses call it."""
        return self.name or server_name(self.url)


class Delivery(Protocol):
    """To the engines of one connection. `world_size` is that of a group; where `num_parts` is not
    0, a lane has so many of them."""

    world_size: int
    num_parts: int
    in_place: bool
    """Whether bytes go past the engine's own loader."""

    def held(self, layouts: Mapping[str, Layout]) -> Held | None:
        """What goes to which rank, from what each engine holds; None: everything to all.

        Raises:
            ValueError: these engines cannot be updated together.
        """
        ...

    async def join(self, engine: EngineControl, group: UpdateGroup) -> None:
        """Returns when the group is complete."""
        ...

    async def leave(self, engine: EngineControl, group_name: str) -> None: ...

    async def receive(
        self, engine: EngineControl, specs: Sequence[TensorSpec], group_name: str
    ) -> None:
        """Take one bucket, which must be on its way meanwhile."""
        ...


class Gathered:
    """Whole tensors to all ranks."""

    num_parts = 0
    in_place = False

    def __init__(self, engines: Sequence[EngineAddress]) -> None:
        self._first_rank: dict[str, int] = {}
        self.world_size = 1  # the sender is rank 0
        for engine in engines:
            self._first_rank[engine.control_name] = self.world_size
            self.world_size += engine.tp

    def held(self, layouts: Mapping[str, Layout]) -> None:
        return None

    async def join(self, engine: EngineControl, group: UpdateGroup) -> None:
        await engine.join_update_group(group, self._first_rank[engine.name])

    async def leave(self, engine: EngineControl, group_name: str) -> None:
        await engine.leave_update_group(group_name)

    async def receive(
        self, engine: EngineControl, specs: Sequence[TensorSpec], group_name: str
    ) -> None:
        await engine.update_bucket(specs, group_name)


class Direct:
    """Each rank's part to it, into its parameters."""

    in_place = True

    def __init__(self, engines: Sequence[EngineAddress]) -> None:
        self.world_size = 1 + len(engines)
        self.num_parts = max((engine.tp for engine in engines), default=1)
        self._rank = {engine.control_name: 1 + i for i, engine in enumerate(engines)}

    def held(self, layouts: Mapping[str, Layout]) -> Held:
        (first_name, first), *others = layouts.items()
        for name, layout in others:
            if layout != first:
                raise ValueError(
                    f"engines {first_name} and {name} hold different parts of the weights: the "
                    "plan `direct` needs engines that are alike, `gather` does not"
                )
        return first

    async def join(self, engine: EngineControl, group: UpdateGroup) -> None:
        timeout_s = engine.timeouts.join_s
        question = {
            **asdict(group),
            "rank": self._rank[engine.name],
            # Of whatever this rank waits for in the group from then on, too.
            "timeout_s": max(timeout_s, engine.timeouts.transfer_s),
        }
        await engine.ask_about_weights(Phase.JOIN, {"join": question}, timeout_s)

    async def leave(self, engine: EngineControl, group_name: str) -> None:
        timeout_s = engine.timeouts.join_s
        await engine.ask_about_weights(Phase.LEAVE, {"leave": group_name}, timeout_s)

    async def receive(
        self, engine: EngineControl, specs: Sequence[TensorSpec], group_name: str
    ) -> None:
        names = [spec.name for spec in specs]
        question = {"receive": {"group": group_name, "names": names}}
        await engine.ask_about_weights(Phase.TRANSFER, question, engine.timeouts.transfer_s)


DELIVERIES: Mapping[PlanKind, type[Gathered] | type[Direct]] = {
    PlanKind.GATHER: Gathered,
    PlanKind.DIRECT: Direct,
}


def pieces(bucket: LooseBucket, held: Held, buffers: TurnBuffers) -> Iterator[tuple[int, Tensor]]:
    """What goes to the engine ranks of each number: (number, bytes), in the order in which those
    expect it (`sglang_receive`). Most are the memory of the bucket's tensors, the others take one
    of `buffers`."""
    tensors = dict(bucket.tensors())
    found: list[tuple[int, list[Tensor], Tensor | None]] = []
    for rank in range(len(next(iter(held.values())))):
        parts: list[Part] = []
        for name, tensor in tensors.items():
            parts += parts_of(name, held[name][rank], tensor.itemsize)
        for run in runs(parts):
            views = [part.view.into(tensors[part.name]) for part in run]
            found.append((rank, views, as_one(views)))
    sizes = [sum(view.nbytes for view in views) for _, views, data in found if data is None]
    device = next(iter(tensors.values())).device
    places = iter(buffers.take_each(sizes, torch.uint8, device))
    for rank, views, data in found:
        if data is None:
            data = next(places)
            pack(views, data)
        yield rank, data
