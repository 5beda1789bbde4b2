"""Full Hugging Face tensors out of tensor- and pipeline-parallel shards, in buckets.

Each pipeline stage gathers a bucket over its tensor-parallel group, then hands it to the other
stages. Data-parallel replicas do the same side by side, so nothing crosses between them. Memory is
one bucket of shards and one of full tensors; a parameter larger than a bucket is one by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magistral.weights.names import Param, shard_shape, unshard


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


def gather_hf(
    local: Mapping[str, Tensor],
    params: Mapping[str, Param],
    mesh: Mesh,
    bucket_bytes: int,
    dtype: torch.dtype,
) -> Iterator[Bucket]:
    """Yields lists of (Hugging Face name, full tensor of `dtype`), the same on every rank.

    `local` is this rank's shards by Megatron name. Collective: every rank must iterate it to the
    end. The tensors are views of a buffer that the next bucket does not reuse.
    """
    held: list[list[str]] = [[] for _ in range(mesh.pp_size)]
    names = [name for name in local if not params[name].is_copy]
    dist.all_gather_object(held, names, group=mesh.pp_group)
    for stage, stage_names in enumerate(held):
        stage_params = [params[name] for name in stage_names]
        for bucket in _buckets(stage_params, mesh.tp_size, bucket_bytes, dtype):
            yield _gather_bucket(bucket, local, stage, mesh, dtype)


def _buckets(
    params: Sequence[Param], tp_size: int, bucket_bytes: int, dtype: torch.dtype
) -> Iterator[list[Param]]:
    bucket: list[Param] = []
    num_bytes = 0
    for param in params:
        size = _num_elements(param, tp_size) * tp_size * dtype.itemsize
        if bucket and num_bytes + size > bucket_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(param)
        num_bytes += size
    if bucket:
        yield bucket


def _gather_bucket(
    bucket: Sequence[Param], local: Mapping[str, Tensor], stage: int, mesh: Mesh, dtype: torch.dtype
) -> Bucket:
    sizes = [_num_elements(param, mesh.tp_size) for param in bucket]
    device = next(iter(local.values())).device
    full = torch.empty(mesh.tp_size, sum(sizes), dtype=dtype, device=device)
    if stage == mesh.pp_rank:
        shards = torch.cat([local[param.name].detach().flatten().to(dtype) for param in bucket])
        dist.all_gather_into_tensor(full.view(-1), shards, group=mesh.tp_group)
    if mesh.pp_size > 1:
        dist.broadcast(full, src=mesh.stage_rank(stage), group=mesh.pp_group)
    tensors: Bucket = []
    for param, columns in zip(bucket, full.split(sizes, dim=1), strict=True):
        shape = shard_shape(param, mesh.tp_size)
        tensors += unshard(param, [row.view(shape) for row in columns])
    return tensors


def _num_elements(param: Param, tp_size: int) -> int:
    return torch.Size(shard_shape(param, tp_size)).numel()
