"""SFT: cross-entropy on the response tokens of supervised traces, packed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from megatron_magistral.config_stages import SftConfig
from megatron_magistral.metrics import MetricsWriter
from megatron_magistral.trainer.checkpoint import Checkpointer
from megatron_magistral.trainer.nonfinite import NonFiniteWatch
from megatron_magistral.trainer.objective import SupervisedObjective
from megatron_magistral.trainer.sft_data import EncodedTrace, sft_sequences, step_indices
from megatron_magistral.trainer.step import StepStats, StepStatus, Trainer
from megatron_magistral.types import Progress


class StepHook(Protocol):
    """What is done after a step, by every rank of the trainer."""

    def after(self, num_steps: int, *, is_last: bool) -> dict[str, float]:
        """Metrics of it; `num_steps` are trained."""
        ...


def train_sft(
    trainer: Trainer,
    traces: Sequence[EncodedTrace],
    config: SftConfig,
    seed: int,
    checkpoints: Checkpointer,
    watch: NonFiniteWatch,
    start: Progress,
    metrics: MetricsWriter | None,
    hooks: Sequence[StepHook] = (),
) -> None:
    """Every step of the stage from `start` on. `metrics` is given on one rank."""
    objective = SupervisedObjective()
    num_steps = config.total_steps(len(traces))
    for step in range(start.next_step, num_steps):
        begin = time.monotonic()
        indices = step_indices(step, len(traces), config.batch_size, seed)
        sequences = sft_sequences([traces[i] for i in indices])
        mine = sequences[trainer.mesh.dp_rank :: trainer.mesh.dp_size]
        stats = trainer.train_minibatch(trainer.pack(mine, config.microbatch_tokens), objective)
        row = step_metrics(stats, time.monotonic() - begin)
        for hook in hooks:
            row |= hook.after(step + 1, is_last=step + 1 == num_steps)
        if metrics is not None:
            metrics.write(step, row)
        watch.look(step, [stats], [mine])
        checkpoints.step_done(Progress(step + 1))
    checkpoints.finish()


def step_metrics(stats: StepStats, elapsed_s: float) -> dict[str, float]:
    """What one optimizer step is reported as."""
    return stats.metrics | {
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "skipped": float(stats.status is StepStatus.NON_FINITE),
        "train_s": elapsed_s,
        "train_tokens_per_s": stats.metrics["tokens"] / elapsed_s,
    }
