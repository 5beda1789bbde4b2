"""Weights that a rank of an engine receives straight into its model's parameters.

SGLang's own way is to receive whole tensors into a buffer and to let the model's `load_weights` cut
out this rank's part. Here only that part comes, over a group of the sender and the ranks of the
same number in all engines, and lands where `observe_loading` saw loading put it: there is no buffer
and no copy. Small parts and those whose place is not contiguous come by way of a buffer.

No import of SGLang: everything that is needed comes from the model object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magistral.rollout.sglang_weights import Copy, Placement, target_of
from megatron_magistral.weights.buffers import TurnBuffers, as_one
from megatron_magistral.weights.parts import Part, parts_of, runs, unpack
from megatron_magistral.weights.store_group import Channels, part_name

# How long a rank waits for the sender's store; the trainer bounds the call itself.
STORE_TIMEOUT = timedelta(seconds=60)


class Receiver:
    """The groups that this rank is in, by name. `rank` is its number in its engine."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._groups: dict[str, Channels] = {}
        self._of_sender: dict[tuple[str, str], str] = {}  # the last one that it made
        self._timeout_s = 0.0  # of each wait for the sender
        self._elsewhere = TurnBuffers(1)

    def join(self, group: Mapping[str, Any]) -> None:
        """A sender has one group: leaves the one that it made before, if it did not say so itself.

        Raises RuntimeError if the group does not get complete in time.
        """
        sender = (group["host"], group["name"].rpartition("-")[0])
        self.leave(self._of_sender.pop(sender, ""))
        self._timeout_s = group["timeout_s"]
        store = dist.TCPStore(group["host"], group["port"], is_master=False, timeout=STORE_TIMEOUT)
        self._groups[group["name"]] = Channels.join(
            store,
            part_name(group["name"], self._rank),
            group["rank"],
            group["world_size"],
            group["backend"],
            self._timeout_s,
        )
        self._of_sender[sender] = group["name"]

    def leave(self, name: str) -> None:
        if (group := self._groups.pop(name, None)) is not None:
            group.leave()

    @torch.no_grad()
    def receive(
        self, model: Any, placement: Placement, group_name: str, names: Sequence[str]
    ) -> None:
        """This rank's parts of the tensors `names`, in this order. When it raises, the parameters
        hold old and new weights."""
        if group_name not in self._groups:
            raise ValueError(f"not in group {group_name}: join it first")
        group = self._groups[group_name]
        timeout = timedelta(seconds=self._timeout_s)
        parameters = dict(model.named_parameters())
        runs = list(_runs(parameters, placement, names))
        memory = _memory(runs, self._elsewhere, next(iter(parameters.values())).device)
        incoming = [group.receive(data, self._timeout_s) for data in memory]
        try:
            for works, run, data in zip(incoming, runs, memory, strict=True):
                for work in works:
                    work.wait(timeout)
                run.settle(data)
        except RuntimeError:
            self._groups.pop(group_name, None)  # what breaks once is of no use any more
            self._elsewhere = TurnBuffers(1)  # bytes may still come to the old one
            raise
        self._elsewhere.rest()
        if memory and memory[0].is_cuda:
            torch.cuda.synchronize()  # the next forward runs on another stream


class _Run:
    """What comes in one operation: `places[i]` are all that part number i belongs to."""

    def __init__(self, places: Sequence[Sequence[Tensor]]) -> None:
        self._places = places
        self._firsts = [first for first, *_ in places]
        self.in_place = as_one(self._firsts)
        """The memory where it belongs, if that is one."""

    @property
    def num_bytes(self) -> int:
        return sum(first.nbytes for first in self._firsts)

    def settle(self, data: Tensor) -> None:
        """Put what came to `data` wherever it has not come to already."""
        if self.in_place is None:
            unpack(data, self._firsts)
        for first, *others in self._places:
            for other in others:
                other.copy_(first)


def _memory(runs: Sequence[_Run], buffers: TurnBuffers, device: torch.device) -> list[Tensor]:
    """What each run comes to: where it belongs, or one of `buffers`."""
    sizes = [run.num_bytes for run in runs if run.in_place is None]
    places = iter(buffers.take_each(sizes, torch.uint8, device))
    return [next(places) if run.in_place is None else run.in_place for run in runs]


def _runs(
    parameters: Mapping[str, Tensor], placement: Placement, names: Sequence[str]
) -> Iterator[_Run]:
    places: dict[Part, list[Tensor]] = {}
    for name in names:
        copies: list[Copy] = placement.copies[name]
        if not copies:
            continue  # of another rank
        itemsize = getattr(torch, copies[0].dtype).itemsize
        for part in parts_of(name, [copy.source for copy in copies], itemsize):
            same = [copy for copy in copies if copy.source == part.view]
            places[part] = [target_of(parameters, copy) for copy in same]
    for run in runs(places):
        yield _Run([places[part] for part in run])
