"""Sums of a minibatch over its microbatches and ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magistral.trainer.batch import PackedBatch
from megatron_magistral.weights.gather import Mesh


def minibatch_sums(
    results: Sequence[dict[str, Tensor]], batches: Sequence[PackedBatch], mesh: Mesh
) -> tuple[dict[str, float], dict[str, float]]:
    """(sums of the objective's metrics, how full and even the microbatches were), on every rank.

    `results` holds the metrics of each microbatch on the last pipeline stage and is empty on the
    others. Sums are taken in fp64: they are of up to millions of tokens.
    """
    device = batches[0].tokens_T.device
    sums: list[dict[str, float]] = [{}]
    if mesh.is_last_stage:
        names = sorted(results[0])
        rows = [torch.stack([r[name].double() for name in names]) for r in results]
        totals = torch.stack(rows).sum(dim=0)
        dist.all_reduce(totals, group=mesh.dp_group)
        sums = [dict(zip(names, totals.tolist(), strict=True))]
    if mesh.pp_size > 1:
        # Only the last stage knows the names, so the others cannot take part in a reduction.
        source = mesh.stage_rank(mesh.pp_size - 1)
        dist.broadcast_object_list(sums, src=source, group=mesh.pp_group)
    return sums[0], _load(batches, mesh, device)


def _load(batches: Sequence[PackedBatch], mesh: Mesh, device: torch.device) -> dict[str, float]:
    num_tokens = sum(batch.num_tokens for batch in batches)
    num_slots = sum(batch.num_slots for batch in batches)
    counts = torch.zeros(mesh.dp_size, 2, dtype=torch.float64, device=device)
    counts[mesh.dp_rank] = torch.tensor([num_tokens, num_slots])
    dist.all_reduce(counts, group=mesh.dp_group)
    tokens, slots = counts.sum(dim=0).tolist()
    busiest = counts[:, 0].max().item()
    return {
        "tokens": tokens,
        "padding_fraction": 1 - tokens / slots,
        "load_imbalance": busiest * mesh.dp_size / max(tokens, 1),
    }
