"""The trainer side of Figure 3 of the paper, as one loop:

    publish weights -> pull a batch -> train its minibatches -> publish weights -> ...

Generators go on while this loop trains, while it publishes all but the pause of the transfer, and
while it saves.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Protocol

from megatron_magistral.algorithm.settings import AlgorithmSettings
from megatron_magistral.config_stages import RlConfig
from megatron_magistral.trainer.batch import PackedBatch
from megatron_magistral.trainer.checkpoint import Checkpointer
from megatron_magistral.trainer.feed import Feed, Instead
from megatron_magistral.trainer.nonfinite import NonFiniteWatch
from megatron_magistral.trainer.objective import PolicyObjective
from megatron_magistral.trainer.sft import step_metrics
from megatron_magistral.trainer.step import StepStats, Trainer
from megatron_magistral.types import Batch, Progress


class Publisher(Protocol):
    """Sends the trainer's weights to the generators. Every rank calls it."""

    def publish(self, version: int) -> dict[str, float]: ...


def train_rl(
    trainer: Trainer,
    feed: Feed,
    publisher: Publisher,
    config: RlConfig,
    checkpoints: Checkpointer,
    watch: NonFiniteWatch,
    *,
    speaks: bool,
) -> None:
    """Every step of the stage that is not done yet. The first update comes before the first prompt.

    One rank `speaks` to the controller of what all of them did. Raises StopRequested, with all that
    was done saved, if the run is to stop.
    """
    settings = config.algorithm.settings(config.num_minibatches)
    progress = checkpoints.restore()
    if speaks:
        feed.start(progress)
    publisher.publish(progress.next_step)
    for step in range(progress.next_step, config.num_steps):
        begin = time.monotonic()
        batch = next_batch(feed, publisher, step, trainer.mesh.dp_rank)
        if batch is None:
            checkpoints.stop()
        pulled = time.monotonic()
        checkpoints.poll()  # a batch takes long: what was written meanwhile is to count by now
        stats = train_batch(trainer, batch, settings, config)
        train_s = time.monotonic() - pulled
        watch.look(step, stats, [minibatch.sequences for minibatch in batch.minibatches])
        update = publisher.publish(step + 1)
        if speaks:
            waited = {"trainer_wait_s": pulled - begin}
            feed.acknowledge(step, mean_step_metrics(stats, train_s) | update | waited)
        checkpoints.step_done(Progress(step + 1))
    checkpoints.finish()


def next_batch(feed: Feed, publisher: Publisher, step: int, data_rank: int) -> Batch | None:
    """This rank's share of `step`, or None if the run is to stop.

    Meanwhile the present weights are published once more whenever an engine came back without them.
    """
    for num_updates in itertools.count():
        answer = feed.pull(step, data_rank, num_updates)
        if isinstance(answer, Batch):
            return answer
        if answer is Instead.STOP:
            return None
        publisher.publish(step)
    raise AssertionError("unreachable")


def train_batch(
    trainer: Trainer, batch: Batch, settings: AlgorithmSettings, config: RlConfig
) -> list[StepStats]:
    """An optimizer step a minibatch; references are those of the weights before the first."""
    if batch.eps_high is not None:
        settings = replace(settings, eps_high=batch.eps_high)
    minibatches = [
        with_references(
            trainer,
            trainer.pack(minibatch.sequences, config.microbatch_tokens),
            settings,
            config.temperature,
        )
        for minibatch in batch.minibatches
    ]
    objective = PolicyObjective(settings, config.temperature, version=batch.step)
    return [trainer.train_minibatch(microbatches, objective) for microbatches in minibatches]


def with_references(
    trainer: Trainer,
    batches: list[PackedBatch],
    settings: AlgorithmSettings,
    temperature: float,
) -> list[PackedBatch]:
    """Adds the log-probabilities that a switch asks for: recomputed old ones, the average's."""
    if settings.recompute_old_logprobs:
        scores = trainer.score(batches, temperature)
        batches = [b.with_old_logprobs(s) for b, s in zip(batches, scores, strict=True)]
    if settings.kl_coef > 0:
        scores = trainer.score_average(batches, temperature)
        batches = [b.with_ema_logprobs(s) for b, s in zip(batches, scores, strict=True)]
    return batches


def mean_step_metrics(stats: list[StepStats], train_s: float) -> dict[str, float]:
    """Means over the optimizer steps of one batch; tokens and time are those of the whole batch."""
    rows = [step_metrics(item, train_s / len(stats)) for item in stats]
    means = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]  # not every age is in every minibatch
        means[name] = sum(values) / len(values)
    num_tokens = sum(row["tokens"] for row in rows)
    return means | {
        "tokens": num_tokens,
        "train_s": train_s,
        "train_tokens_per_s": num_tokens / train_s,
    }
