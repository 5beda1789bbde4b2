"""One optimizer step over the microbatches of a minibatch, and the other things a loop needs of
the model: scores, averaged weights, full weights for the generators, model directories.

    trainer = Trainer.create(hf_dir, layout, settings, dtype=torch.bfloat16)
    batches = trainer.pack(sequences, max_tokens=32768)
    stats = trainer.train_minibatch(batches, PolicyObjective(AlgorithmSettings()))
    for bucket in trainer.named_hf_buckets(512 << 20): ...

Every method but `pack` is collective: all ranks call it, in the same order. Results are the same
on all ranks unless said otherwise.

Shapes: R trained rows (output tokens) of one microbatch, H hidden size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magistral.trainer.batch import PackedBatch, pack_microbatches
from megatron_magistral.trainer.ema import WeightAverage
from megatron_magistral.trainer.layout import ParallelLayout, check_layout
from megatron_magistral.trainer.logprobs import Head
from megatron_magistral.trainer.megatron import (
    MegatronModel,
    MegatronOptimizer,
    destroy_distributed,
    init_distributed,
)
from megatron_magistral.trainer.megatron_backend import find_backend
from megatron_magistral.trainer.megatron_layers import USES_TRANSFORMER_ENGINE
from megatron_magistral.trainer.objective import Objective
from megatron_magistral.trainer.reduce import minibatch_sums
from megatron_magistral.trainer.settings import OptimizerSettings
from megatron_magistral.types import TrainSequence
from megatron_magistral.weights.architecture import Architecture, read_architecture
from megatron_magistral.weights.buffers import Staging
from megatron_magistral.weights.gather import Bucket, Mesh, Reach, gather_hf
from megatron_magistral.weights.hf_dir import HFWeights, open_weights, write_hf_dir
from megatron_magistral.weights.names import Param, hf_shapes, parameters, shard


class StepStatus(StrEnum):
    UPDATED = "updated"
    NON_FINITE = "non_finite"  # loss or gradient was inf or nan: the weights did not change


@dataclass(frozen=True)
class StepStats:
    """What one step did. `metrics` are the objective's, as means over the minibatch, and:

    tokens, padding_fraction   of all ranks' microbatches; padding is what of the budget is empty
    load_imbalance             tokens of the busiest data-parallel rank / mean
    """

    status: StepStatus
    loss: float
    grad_norm: float
    lr: float
    metrics: dict[str, float]


@dataclass
class Trainer:
    """One rank of the trainer."""

    hf_dir: Path
    arch: Architecture
    layout: ParallelLayout
    mesh: Mesh
    dtype: torch.dtype
    model: MegatronModel
    optimizer: MegatronOptimizer
    params: dict[str, Param]
    average: WeightAverage | None = None
    staging: Staging = field(default_factory=Staging)

    @classmethod
    def create(
        cls,
        hf_dir: Path,
        layout: ParallelLayout,
        settings: OptimizerSettings,
        *,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        timeout_s: float = 600.0,
        recompute: bool = False,
        ema_decay: float | None = None,
    ) -> Trainer:
        """Joins the other ranks (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment),
        builds the model of `hf_dir` in `layout` and loads its weights.

        `recompute` keeps only layer inputs for the backward pass. `ema_decay` keeps a moving
        average of the weights. Raises ArchitectureError, BackendError, LayoutError or WeightsError
        before any rank waits for another.
        """
        backend = find_backend()
        arch = read_architecture(hf_dir)
        check_layout(arch, layout)
        weights = open_weights(hf_dir, arch)
        mesh = init_distributed(layout, timeout_s, seed)
        if dist.get_rank() == 0:
            backend.announce()
        model = MegatronModel(arch, layout, mesh, dtype, recompute)
        params = parameters(arch, fused_norms=USES_TRANSFORMER_ENGINE)
        _load(model, params, weights)
        optimizer = MegatronOptimizer(model, settings, dtype)
        trainer = cls(hf_dir, arch, layout, mesh, dtype, model, optimizer, params)
        if ema_decay is not None:
            trainer.average = WeightAverage([p for _, p in model.named_parameters()], ema_decay)
        return trainer

    def pack(self, sequences: Sequence[TrainSequence], max_tokens: int) -> list[PackedBatch]:
        """This data-parallel rank's sequences as microbatches of at most `max_tokens` tokens."""
        multiple = self.layout.token_multiple
        return pack_microbatches(sequences, max_tokens, multiple, self.model.device)

    def train_minibatch(self, batches: Sequence[PackedBatch], objective: Objective) -> StepStats:
        """One optimizer step on the sum of the objective over all microbatches of all ranks.

        Every rank of a data-parallel replica passes the same `batches`; replicas may differ in
        how many. If the loss or the gradient is not finite nothing is updated.
        """
        self.model.zero_grad()

        def loss(hidden_RH: Tensor, head: Head, batch: PackedBatch) -> tuple[Tensor, Any]:
            scores = head.score(hidden_RH, batch.targets_R, objective.temperature)
            outputs = objective.loss(*scores, batch)
            return outputs.loss, outputs.metrics

        results = self.model.forward_backward(batches, loss)
        sums, shares = minibatch_sums(results, batches, self.mesh)
        metrics = objective.means(sums) | shares
        grad_norm = self.optimizer.grad_norm()
        if not (math.isfinite(metrics["loss"]) and math.isfinite(grad_norm)):
            return StepStats(
                StepStatus.NON_FINITE, metrics["loss"], grad_norm, lr=0.0, metrics=metrics
            )
        lr = self.optimizer.step()
        if self.average is not None:
            self.average.update()
        return StepStats(StepStatus.UPDATED, metrics["loss"], grad_norm, lr, metrics)

    def score(self, batches: Sequence[PackedBatch], temperature: float = 1.0) -> list[Tensor]:
        """Log-probabilities [R] of each microbatch under the present weights. No gradients."""

        def logprobs(hidden_RH: Tensor, head: Head, batch: PackedBatch) -> Tensor:
            return head.score(hidden_RH, batch.targets_R, temperature)[0]

        scores = self.model.forward(batches, logprobs)
        if self.mesh.pp_size == 1:
            return scores
        if not self.mesh.is_last_stage:
            scores = [torch.empty_like(batch.old_logprobs_R) for batch in batches]
        for score in scores:
            source = self.mesh.stage_rank(self.mesh.pp_size - 1)
            dist.broadcast(score, src=source, group=self.mesh.pp_group)
        return scores

    def score_average(
        self, batches: Sequence[PackedBatch], temperature: float = 1.0
    ) -> list[Tensor]:
        """`score` under the moving average of the weights. Raises ValueError if none is kept."""
        if self.average is None:
            raise ValueError("no moving average is kept: create the trainer with ema_decay")
        with self.average.swapped_in():
            return self.score(batches, temperature)

    def named_hf_buckets(
        self,
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
        reach: Reach = Reach.EVERYONE,
        lends: bool = False,
    ) -> Iterator[Bucket]:
        """The whole model under Hugging Face names, in buckets of about `bucket_bytes` bytes; see
        `gather_hf` for who gets them and how long they live."""
        local = dict(self.model.named_parameters())
        return gather_hf(
            local,
            self.params,
            self.mesh,
            bucket_bytes,
            dtype or self.dtype,
            reach=reach,
            lends=lends,
            staging=self.staging,
        )

    def save_hf(
        self, target: Path, dtype: torch.dtype | None = None, bucket_bytes: int = 256 << 20
    ) -> None:
        """Writes a Hugging Face directory with the config and tokenizer the model came with. No
        rank holds more than one bucket. Returns on every rank when it is complete."""
        buckets = self.named_hf_buckets(bucket_bytes, dtype)
        if dist.get_rank() == 0:
            shapes = hf_shapes(self.arch)
            write_hf_dir(target, buckets, dtype or self.dtype, self.hf_dir, shapes)
        else:
            deque(buckets, maxlen=0)  # a loop would hold a bucket while it waits for the next
        dist.barrier()

    def close(self) -> None:
        """Leaves the process groups. The trainer cannot be used afterwards."""
        destroy_distributed()


@torch.no_grad()
def _load(model: MegatronModel, params: dict[str, Param], weights: HFWeights) -> None:
    """One parameter at a time: never more than one Hugging Face tensor group in memory."""
    for name, parameter in model.named_parameters():
        param = params[name]
        sources = [weights[source] for source in param.sources]
        parameter.copy_(shard(param, sources, *model.mesh.part_of(param)))
