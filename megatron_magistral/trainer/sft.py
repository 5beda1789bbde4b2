"""SFT: cross-entropy on the response tokens of supervised traces, packed.

The traces of a step are a function of (seed, step): nothing to save, nothing to lose on resume.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from megatron_magistral.config_stages import SftConfig
from megatron_magistral.metrics import MetricsWriter
from megatron_magistral.prompts import render_prompt
from megatron_magistral.trainer.checkpoint import Checkpointer
from megatron_magistral.trainer.nonfinite import NonFiniteWatch
from megatron_magistral.trainer.objective import SupervisedObjective
from megatron_magistral.trainer.step import StepStats, StepStatus, Trainer
from megatron_magistral.types import Progress, Trace, TrainSequence

log = logging.getLogger(__name__)

EncodedTrace = tuple[list[int], list[int]]
"""Prompt ids; response ids, ending in the end-of-sequence token."""


def train_sft(
    trainer: Trainer,
    traces: Sequence[EncodedTrace],
    config: SftConfig,
    seed: int,
    checkpoints: Checkpointer,
    watch: NonFiniteWatch,
    start: Progress,
    metrics: MetricsWriter | None,
) -> None:
    """Every step of the stage from `start` on. `metrics` is given on one rank."""
    objective = SupervisedObjective()
    for step in range(start.next_step, config.num_steps):
        begin = time.monotonic()
        indices = step_indices(step, len(traces), config.batch_size, seed)
        sequences = sft_sequences([traces[i] for i in indices])
        mine = sequences[trainer.mesh.dp_rank :: trainer.mesh.dp_size]
        stats = trainer.train_minibatch(trainer.pack(mine, config.microbatch_tokens), objective)
        if metrics is not None:
            metrics.write(step, step_metrics(stats, time.monotonic() - begin))
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


def encode_traces(
    traces: Sequence[Trace], tokenizer: PreTrainedTokenizerBase, template: str, max_tokens: int
) -> list[EncodedTrace]:
    """Token ids of every trace that fits into `max_tokens`; the log says how many did not.

    Raises ValueError if none fits.
    """
    encoded = [
        (
            tokenizer.encode(render_prompt(trace.statement, template)),
            [*tokenizer.encode(trace.response, add_special_tokens=False), tokenizer.eos_token_id],
        )
        for trace in traces
    ]
    fitting = [pair for pair in encoded if len(pair[0]) + len(pair[1]) <= max_tokens]
    if len(fitting) < len(encoded):
        num_long = len(encoded) - len(fitting)
        log.warning("set aside %d traces of more than %d tokens", num_long, max_tokens)
    if not fitting:
        raise ValueError(f"none of {len(traces)} traces fits into {max_tokens} tokens")
    return fitting


def sft_sequences(traces: Sequence[EncodedTrace]) -> list[TrainSequence]:
    """Sequences of one step, each response token weighted 1 / (response tokens of the step)."""
    num_tokens = sum(len(response) for _, response in traces)
    return [
        TrainSequence(
            tokens=(*prompt, *response),
            num_prompt_tokens=len(prompt),
            logprobs=(),
            spans=(),
            advantage=0.0,
            weight=1.0 / num_tokens,
        )
        for prompt, response in traces
    ]


def step_indices(step: int, num_traces: int, batch_size: int, seed: int) -> list[int]:
    """Which traces `step` trains: epochs, each a permutation of its own, cut into batches."""
    positions = range(step * batch_size, (step + 1) * batch_size)
    pairs = [divmod(position, num_traces) for position in positions]
    return [_permutation(epoch, num_traces, seed)[place] for epoch, place in pairs]


@lru_cache(maxsize=2)
def _permutation(epoch: int, num_traces: int, seed: int) -> list[int]:
    order = list(range(num_traces))
    random.Random(f"{seed}/sft/{epoch}").shuffle(order)
    return order
