"""Full Hugging Face tensors out of tensor-, expert- and pipeline-parallel shards, in buckets.

Each pipeline stage gathers a bucket over its tensor-parallel group, takes each run of whole experts
from the rank of its expert-parallel group that holds them, then hands the bucket to the other
stages. The groups of a stage do the same side by side, and nothing crosses between them.

The tensors of a bucket lie behind each other in one buffer, ready to be sent (see `flatten`).
Memory is that buffer and, where tensors are divided, a scratch of a sixteenth of it; a tensor
larger than a bucket is one by itself.

What is only to be sent need not be everywhere: then the first rank of each stage, its leader, puts
together the tensors of its stage, and nothing crosses between stages (see `Reach`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magistral.weights.buffers import Staging
from megatron_magistral.weights.join import Divided, JoinOnFirst
from megatron_magistral.weights.names import Param, Split, local_parts, local_views, shard_shape
from megatron_magistral.weights.plan import cut, filled_bytes, scratch_bytes


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the layout, and the groups that it shares it with. An expert-parallel
    group lies within a pipeline stage, across its tensor- and data-parallel ones."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    ep_rank: int = 0
    ep_size: int = 1
    ep_group: dist.ProcessGroup | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its pipeline stage."""
        return self.tp_rank == 0 and self.dp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def stage_rank(self, stage: int) -> int:
        """The global rank of this rank's peer on pipeline stage `stage`."""
        return dist.get_global_rank(self.pp_group, stage)

    def part_of(self, param: Param) -> tuple[int, int]:
        """Which part of `param` this rank holds, and of how many that it is divided into."""
        if param.expert is not None and self.ep_size > 1:
            return 0, 1
        return self.tp_rank, self.tp_size


Bucket = list[tuple[str, Tensor]]


class Reach(StrEnum):
    """Who gets which full tensors."""

    EVERYONE = "everyone"
    LEADERS = "leaders"  # the leader of a stage gets that stage's, and no other rank any


@dataclass
class GatherSeconds:
    """Where the time of a gather goes: between ranks, and into dtype and layout of the wire."""

    wire_s: float = 0.0
    convert_s: float = 0.0


@dataclass(frozen=True)
class _Source:
    """Tensor number `index` of those that `param` is made of."""

    param: Param
    index: int

    @property
    def name(self) -> str:
        return self.param.sources[self.index]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.param.shapes[self.index])

    def local(self, shards: Mapping[str, Tensor], tp_size: int) -> Tensor:
        return local_parts(self.param, shards[self.param.name].detach(), tp_size)[self.index]

    def copy_to(self, target: Tensor, shards: Mapping[str, Tensor]) -> None:
        """All of it, where this rank holds all: from where it is, without a copy in between."""
        shard = shards[self.param.name].detach()
        view = local_views(self.param, shard, tp_size=1)[self.index]
        target.view(view.shape).copy_(view)

    def local_shape(self, tp_size: int) -> torch.Size:
        """The shape of one rank's part, padding rows included."""
        fused = shard_shape(self.param, tp_size)
        if self.param.split not in (Split.QKV, Split.GATE_UP):
            return torch.Size(fused)
        return torch.Size((self.shape[0] // tp_size, *self.shape[1:]))


def gather_hf(
    local: Mapping[str, Tensor],
    params: Mapping[str, Param],
    mesh: Mesh,
    bucket_bytes: int,
    dtype: torch.dtype,
    seconds: GatherSeconds | None = None,
    *,
    reach: Reach = Reach.EVERYONE,
    lends: bool = False,
    staging: Staging | None = None,
) -> Iterator[Bucket]:
    """Yields lists of (Hugging Face name, full tensor of `dtype`), the same on every rank, in the
    buckets and the order of `gather_plan`.

    `local` is this rank's shards by Megatron name. Collective: every rank must iterate it to the
    end. The tensors are views of a buffer that no other bucket uses. `seconds` is added to; on a
    GPU that waits for it, so leave it out where time counts.

    For `reach` LEADERS it is collective over the ranks of a stage alone. Its leader gets the
    buckets of that stage, other ranks empty lists or none; there are two buffers in turn, so that
    a bucket is gone when the one after the next comes. They are of `staging`, whose memory the next
    gather uses again. With `lends`, what the leader holds as it is to be sent is no copy but a view
    of `local`.
    """
    names = [name for name in local if not params[name].is_copy]
    owners = _expert_owners(names, params, mesh)
    mine = {*names, *owners}
    in_order = [name for name in params if name in mine]
    if reach is Reach.LEADERS:
        # Data-parallel copies hold the same, unless experts are spread over them.
        takes_part = mesh.dp_rank == 0 or mesh.ep_size > 1
        held = {mesh.pp_rank: in_order} if takes_part else {}
    else:
        held = _held_by_stage(in_order, mesh)
    staging = staging or Staging()
    gather = _Gather(
        local,
        mesh,
        scratch_bytes(bucket_bytes),
        dtype,
        owners,
        seconds or GatherSeconds(),
        reach,
        staging,
    )
    most_bytes = filled_bytes(bucket_bytes)
    gather.lends = lends and reach is Reach.LEADERS and mesh.ep_size == 1
    gather.synchronises = seconds is not None
    try:
        for stage, stage_names in held.items():
            sources = [
                _Source(params[name], i)
                for name in stage_names
                for i in range(len(params[name].sources))
            ]
            for bucket in cut(sources, lambda s: s.shape.numel() * dtype.itemsize, most_bytes):
                yield gather.bucket(stage, bucket)
    finally:
        staging.rest()


def _held_by_stage(mine: list[str], mesh: Mesh) -> dict[int, list[str]]:
    held: list[list[str]] = [[] for _ in range(mesh.pp_size)]
    dist.all_gather_object(held, mine, group=mesh.pp_group)
    return dict(enumerate(held))


def _expert_owners(names: Sequence[str], params: Mapping[str, Param], mesh: Mesh) -> dict[str, int]:
    """Which rank of the expert-parallel group holds each expert's parameters, on this rank's
    stage; none where experts are not spread over ranks."""
    if mesh.ep_size == 1:
        return {}
    everyone: list[list[str]] = [[] for _ in range(mesh.ep_size)]
    mine = [name for name in names if params[name].expert is not None]
    dist.all_gather_object(everyone, mine, group=mesh.ep_group)
    return {name: rank for rank, theirs in enumerate(everyone) for name in theirs}


@dataclass
class _Gather:
    local: Mapping[str, Tensor]
    mesh: Mesh
    scratch_bytes: int
    dtype: torch.dtype
    owners: Mapping[str, int]
    seconds: GatherSeconds
    reach: Reach
    staging: Staging
    synchronises: bool = False
    lends: bool = False

    def bucket(self, stage: int, sources: Sequence[_Source]) -> Bucket:
        lent = {source.name: view for source in sources if (view := self._lent(source)) is not None}
        copied = [source for source in sources if source.name not in lent]
        sizes = [source.shape.numel() for source in copied]
        flat = self._buffer(sum(sizes))
        targets = [t.view(s.shape) for t, s in zip(flat.split(sizes), copied, strict=True)]
        named = list(zip(copied, targets, strict=True))
        if stage == self.mesh.pp_rank:
            self._fill(named)
            self._share_experts(flat, copied)
        if self.reach is Reach.LEADERS:
            if not self.mesh.is_leader:
                return []
        elif self.mesh.pp_size > 1:
            with self._timed("wire_s"):
                dist.broadcast(flat, src=self.mesh.stage_rank(stage), group=self.mesh.pp_group)
        tensors = lent | {source.name: target for source, target in named}
        return [(source.name, tensors[source.name]) for source in sources]

    def _lent(self, source: _Source) -> Tensor | None:
        """The whole tensor where it is, if it is there as it is to be sent."""
        if not self.lends or self._is_divided(source.param):
            return None
        view = local_views(source.param, self.local[source.param.name].detach(), tp_size=1)
        tensor = view[source.index]
        if tensor.dtype != self.dtype or tensor.shape != source.shape:
            return None
        return tensor if tensor.is_contiguous() else None

    def _is_divided(self, param: Param) -> bool:
        return self.mesh.part_of(param)[1] > 1 and param.split is not Split.REPLICATED

    def _buffer(self, num_elements: int) -> Tensor:
        """[num_elements], new unless it is only to be sent."""
        if self.reach is Reach.EVERYONE:
            return torch.empty(num_elements, dtype=self.dtype, device=self._device)
        if not self.mesh.is_leader and self.mesh.ep_size == 1:
            return torch.empty(num_elements, dtype=self.dtype, device="meta")
        return self.staging.buckets.take(num_elements, self.dtype, self._device)

    def _fill(self, named: Sequence[tuple[_Source, Tensor]]) -> None:
        """With all that is replicated or divided over tensor-parallel ranks, and with the experts
        that this rank holds."""
        named = [(source, target) for source, target in named if source.param.name in self.local]
        divided = [(source, target) for source, target in named if self._is_divided(source.param)]
        is_divided = {source.name for source, _ in divided}
        with self._timed("convert_s"):
            for source, target in named:
                if source.name not in is_divided:
                    source.copy_to(target, self.local)
        if self.reach is Reach.LEADERS:
            self._join_on_first(divided)
            return
        for group in cut(divided, lambda item: item[1].nbytes, self.scratch_bytes):
            self._fill_divided(group)

    def _join_on_first(self, named: Sequence[tuple[_Source, Tensor]]) -> None:
        """As `_fill_divided`, but for the first rank of the group alone."""
        pieces = [piece for source, target in named for piece in self._pieces(source, target)]
        with self._timed("wire_s"):
            join = JoinOnFirst(self.mesh.tp_group, self.staging.arriving)
            for group in cut(pieces, lambda piece: piece.target.nbytes, self.scratch_bytes):
                join.start(group)
            join.finish()

    def _pieces(self, source: _Source, target: Tensor) -> Iterator[Divided]:
        """All of it where parts are of rows, which arrive where they belong; so many rows at a time
        as fit the scratch where they are of columns, which do not."""
        part = source.local(self.local, self.mesh.tp_size)
        if source.param.split is not Split.COLUMNS:
            yield Divided(part, target, axis=0)
            return
        num_rows = max(1, self.scratch_bytes // target[:1].nbytes)
        for of_part, of_target in zip(part.split(num_rows), target.split(num_rows), strict=True):
            yield Divided(of_part, of_target, axis=1)

    def _fill_divided(self, group: Sequence[tuple[_Source, Tensor]]) -> None:
        """One collective for all tensors of the group."""
        tp_size = self.mesh.tp_size
        sizes = [source.local_shape(tp_size).numel() for source, _ in group]
        with self._timed("convert_s"):
            mine = torch.empty(sum(sizes), dtype=self.dtype, device=self._device)
            for (source, _), part in zip(group, mine.split(sizes), strict=True):
                part.view(source.local_shape(tp_size)).copy_(source.local(self.local, tp_size))
            everyone = mine.new_empty(tp_size, len(mine))
        with self._timed("wire_s"):
            dist.all_gather_into_tensor(everyone.view(-1), mine, group=self.mesh.tp_group)
        with self._timed("convert_s"):
            for (source, target), columns in zip(group, everyone.split(sizes, dim=1), strict=True):
                parts = [row.view(source.local_shape(tp_size)) for row in columns]
                _join(parts, target, axis=int(source.param.split is Split.COLUMNS))

    def _share_experts(self, flat: Tensor, sources: Sequence[_Source]) -> None:
        """One broadcast for each run of experts that one rank holds."""
        begin = 0
        for owner, run in groupby(sources, lambda source: self.owners.get(source.param.name)):
            end = begin + sum(source.shape.numel() for source in run)
            if owner is not None:
                assert self.mesh.ep_group is not None
                root = dist.get_global_rank(self.mesh.ep_group, owner)
                with self._timed("wire_s"):
                    dist.broadcast(flat[begin:end], src=root, group=self.mesh.ep_group)
            begin = end

    @property
    def _device(self) -> torch.device:
        return next(iter(self.local.values())).device

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = self._now()
        yield
        setattr(self.seconds, part, getattr(self.seconds, part) + self._now() - start)

    def _now(self) -> float:
        if self.synchronises and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()


def _join(parts: Sequence[Tensor], target: Tensor, axis: int) -> None:
    """Copies parts that follow each other along `axis` into `target`, but for padding."""
    start = 0
    for part in parts:
        size = min(part.shape[axis], target.shape[axis] - start)  # less where rows are padding
        target.narrow(axis, start, size).copy_(part.narrow(axis, 0, size))
        start += size
