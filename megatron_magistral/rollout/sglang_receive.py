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
from megatron_magistral.weights.buffers import as_one, wire_buffer
from megatron_magistral.weights.parts import Part, parts_of, runs, unpack
from megatron_magistral.weights.store_group import join_at_store, part_name, receive_run

# How long a rank waits for the sender's store; the trainer bounds the call itself.
STORE_TIMEOUT = timedelta(seconds=60)


class Receiver:
    """The groups that this rank is in, by name. `rank` is its number in its engine."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._timeout_s = 0.0  # of each wait for the sender

    def join(self, group: Mapping[str, Any]) -> None:
        """Raises RuntimeError if the group does not get complete in time."""
        self._timeout_s = group["timeout_s"]
        store = dist.TCPStore(group["host"], group["port"], is_master=False, timeout=STORE_TIMEOUT)
        self._groups[group["name"]] = join_at_store(
            store,
            part_name(group["name"], self._rank),
            group["rank"],
            group["world_size"],
            group["backend"],
            self._timeout_s,
        )

    def leave(self, name: str) -> None:
        if (group := self._groups.pop(name, None)) is not None:
            dist.destroy_process_group(group)

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
        incoming = [
            (receive_run(group, run.memory, self._timeout_s), run)
            for run in _runs(dict(model.named_parameters()), placement, names)
        ]
        try:
            for work, run in incoming:
                work.wait(timeout)
                run.settle()
        except RuntimeError:
            self._groups.pop(group_name, None)  # what breaks once is of no use any more
            raise
        if incoming and incoming[0][1].memory.is_cuda:
            torch.cuda.synchronize()  # the next forward runs on another stream


class _Run:
    """What comes in one operation: `places[i]` are all that part number i belongs to."""

    def __init__(self, places: Sequence[Sequence[Tensor]]) -> None:
        self._places = places
        firsts = [first for first, *_ in places]
        in_place = as_one(firsts)
        self._is_in_place = in_place is not None
        num_bytes = sum(first.nbytes for first in firsts)
        self.memory = wire_buffer(num_bytes, firsts[0].device) if in_place is None else in_place

    def settle(self) -> None:
        """Put what came wherever it has not come to already."""
        if not self._is_in_place:
            unpack(self.memory, [first for first, *_ in self._places])
        for first, *others in self._places:
            for other in others:
                other.copy_(first)


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
