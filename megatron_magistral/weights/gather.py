"""Full Hugging Face tensors out of tensor- and pipeline-parallel shards, in buckets.

Each pipeline stage gathers a bucket over its tensor-parallel group, then hands it to the other
stages. Data-parallel replicas do the same side by side, so nothing crosses between them.

The tensors of a bucket lie behind each other in one buffer, ready to be sent (see `flatten`).
Memory is that buffer and, where tensors are divided, a scratch of a sixteenth of it or of one
tensor; a tensor larger than a bucket is one by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magistral.weights.names import Param, Split, local_parts, shard_shape
from megatron_magistral.weights.plan import cut

_SCRATCH_SHARE = 16


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the layout, and the groups that it shares it with."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def stage_rank(self, stage: int) -> int:
        """The global rank of this rank's peer on pipeline stage `stage`."""
        return dist.get_global_rank(self.pp_group, stage)


Bucket = list[tuple[str, Tensor]]


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
) -> Iterator[Bucket]:
    """Yields lists of (Hugging Face name, full tensor of `dtype`), the same on every rank, in the
    buckets and the order of `gather_plan`.

    `local` is this rank's shards by Megatron name. Collective: every rank must iterate it to the
    end. The tensors are views of a buffer that the next bucket does not reuse. `seconds` is added
    to; on a GPU that waits for it, so leave it out where time counts.
    """
    held: list[list[str]] = [[] for _ in range(mesh.pp_size)]
    names = [name for name, param in params.items() if name in local and not param.is_copy]
    dist.all_gather_object(held, names, group=mesh.pp_group)
    gather = _Gather(local, mesh, bucket_bytes // _SCRATCH_SHARE, dtype, seconds or GatherSeconds())
    gather.synchronises = seconds is not None
    for stage, stage_names in enumerate(held):
        sources = [
            _Source(params[name], i)
            for name in stage_names
            for i in range(len(params[name].sources))
        ]
        for bucket in cut(sources, lambda s: s.shape.numel() * dtype.itemsize, bucket_bytes):
            yield gather.bucket(stage, bucket)


@dataclass
class _Gather:
    local: Mapping[str, Tensor]
    mesh: Mesh
    scratch_bytes: int
    dtype: torch.dtype
    seconds: GatherSeconds
    synchronises: bool = False

    def bucket(self, stage: int, sources: Sequence[_Source]) -> Bucket:
        sizes = [source.shape.numel() for source in sources]
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=self._device)
        targets = [t.view(s.shape) for t, s in zip(flat.split(sizes), sources, strict=True)]
        named = list(zip(sources, targets, strict=True))
        if stage == self.mesh.pp_rank:
            self._fill(named)
        if self.mesh.pp_size > 1:
            with self._timed("wire_s"):
                dist.broadcast(flat, src=self.mesh.stage_rank(stage), group=self.mesh.pp_group)
        return [(source.name, target) for source, target in named]

    def _fill(self, named: Sequence[tuple[_Source, Tensor]]) -> None:
        tp_size = self.mesh.tp_size
        divided = [
            (source, target)
            for source, target in named
            if tp_size > 1 and source.param.split is not Split.REPLICATED
        ]
        is_divided = {source.name for source, _ in divided}
        with self._timed("convert_s"):
            for source, target in named:
                if source.name not in is_divided:
                    target.copy_(source.local(self.local, tp_size))
        scratch = cut(divided, lambda item: item[1].nbytes, self.scratch_bytes)
        for group in scratch:
            self._fill_divided(group)

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
