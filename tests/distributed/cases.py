"""What ranks compute for the tests of this folder, and the same by `transformers` alone.

Shapes: R rows (output tokens), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magistral.algorithm.loss import policy_loss
from megatron_magistral.algorithm.settings import AlgorithmSettings
from megatron_magistral.trainer.batch import PackedBatch
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.logprobs import Head
from megatron_magistral.trainer.megatron import destroy_model_parallel
from megatron_magistral.trainer.objective import PolicyObjective
from megatron_magistral.trainer.settings import OptimizerSettings
from megatron_magistral.trainer.step import StepStats, Trainer
from megatron_magistral.types import TrainSequence
from megatron_magistral.weights.gather import gather_hf
from tests.trainer.models import by_checkpoint_name

OBJECTIVE = PolicyObjective(
    AlgorithmSettings(eps_low=0.2, eps_high=0.3, entropy_coef=0.01), temperature=0.7
)
SETTINGS = OptimizerSettings(lr=1e-2, clip_grad=1e9)  # gradients are read after the step


@dataclass(frozen=True)
class Outcome:
    """One step in one layout: `logits` [tokens, V] and `scores` of the sequences in their order,
    gradients under Hugging Face names, and the statistics of every rank."""

    logits: Tensor
    scores: list[Tensor]
    gradients: dict[str, Tensor]
    stats: list[StepStats]


@contextmanager
def trainer(
    hf_dir: Path, layout: ParallelLayout, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """A trainer on the ranks that are running, whose groups are forgotten at the end."""
    try:
        yield Trainer.create(hf_dir, layout, SETTINGS, dtype=dtype, timeout_s=60, **options)
    finally:
        destroy_model_parallel()


def share(sequences: Sequence[TrainSequence], rank: int, count: int) -> list[TrainSequence]:
    return list(sequences[rank::count])


def one_step(
    hf_dir: Path, layout: ParallelLayout, sequences: Sequence[TrainSequence], max_tokens: int
) -> Outcome:
    with trainer(hf_dir, layout) as t:
        mine = share(sequences, t.mesh.dp_rank, t.mesh.dp_size)
        batches = t.pack(mine, max_tokens)
        scores = _in_order(t, t.score(batches, OBJECTIVE.temperature), mine, sequences, max_tokens)
        logits = _in_order(t, t.model.forward(batches, _logits), mine, sequences, max_tokens)
        stats: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(stats, t.train_minibatch(batches, OBJECTIVE))
        return Outcome(torch.cat(logits), scores, gradients(t), stats)


def _logits(hidden_RH: Tensor, head: Head, batch: PackedBatch) -> Tensor:
    columns = hidden_RH @ head.weight_VH.T
    if head.shard.group is None:
        return columns
    parts: list[Any] = [None] * head.shard.group.size()
    dist.all_gather_object(parts, columns, group=head.shard.group)
    return torch.cat(parts, dim=-1)


def _in_order(
    t: Trainer,
    per_batch: list[Tensor],
    mine: list[TrainSequence],
    sequences: Sequence[TrainSequence],
    max_tokens: int,
) -> list[Tensor]:
    """Per microbatch on one replica's last stage -> per sequence, on every rank."""
    from megatron_magistral.algorithm.collate import collate

    found: dict[tuple[int, ...], Tensor] = {}
    if per_batch:
        plan = collate([len(s.tokens) for s in mine], max_tokens)
        for indices, values in zip(plan, per_batch, strict=True):
            counts = [mine[i].num_output_tokens for i in indices]
            for i, part in zip(indices, values.split(counts), strict=True):
                found[mine[i].tokens] = part.clone()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    merged = {tokens: part for each in everyone for tokens, part in each.items()}
    return [merged[s.tokens] for s in sequences]


def gradients(t: Trainer) -> dict[str, Tensor]:
    """The gradient that the optimizer sees, unclipped, under Hugging Face names."""
    for chunk in t.model.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                # The distributed optimizer reduces to each rank its own part of the buffer.
                part = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, part, group=group)
    local = {name: p.main_grad for name, p in t.model.named_parameters()}
    buckets = gather_hf(local, t.params, t.mesh, 1 << 30, torch.float32)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


# --- the same by transformers -----------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    logits: Tensor
    scores: list[Tensor]
    gradients: dict[str, Tensor]
    loss: float


def reference(model: Any, sequences: Sequence[TrainSequence]) -> Reference:
    """In float64, one sequence at a time, with no packing and no masks."""
    model = model.double()
    model.zero_grad()
    logits, scores = [], []
    loss = torch.zeros((), dtype=torch.float64)
    for s in sequences:
        tokens = torch.tensor(s.tokens)
        rows = slice(s.num_prompt_tokens - 1, len(tokens) - 1)
        x_RV = model(tokens[None]).logits[0, rows]
        logp_RV = torch.log_softmax(x_RV / OBJECTIVE.temperature, dim=-1)
        logprobs = logp_RV.gather(-1, tokens[s.num_prompt_tokens :, None])[:, 0]
        entropy = -(logp_RV.exp() * logp_RV).sum(-1)
        old = torch.tensor(s.logprobs, dtype=torch.float64)
        loss = (
            loss
            + policy_loss(
                logprobs,
                old,
                torch.full_like(old, s.advantage),
                torch.full_like(old, s.weight),
                eps_low=OBJECTIVE.settings.eps_low,
                eps_high=OBJECTIVE.settings.eps_high,
                entropy_T=entropy,
                entropy_coef=OBJECTIVE.settings.entropy_coef,
            ).loss
        )
        logits.append(x_RV.detach())
        scores.append(logprobs.detach())
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    named = by_checkpoint_name(model.config.model_type, grads)
    return Reference(torch.cat(logits), scores, named, loss.item())


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
