"""Validation of the SFT stage: cross-entropy on held-out traces, and the weights with the least.

The traces of a problem are held out together: another trace of a problem that was trained on would
tell how well its answer is remembered.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_magistral.config_stages import SftConfig
from megatron_magistral.trainer.sft_data import EncodedTrace, sft_sequences
from megatron_magistral.trainer.step import Trainer
from megatron_magistral.types import Trace

log = logging.getLogger(__name__)

HASH_BYTES = 8


def split_traces(
    traces: Sequence[Trace], fraction: float, seed: int
) -> tuple[list[Trace], list[Trace]]:
    """(to train on, held out). About `fraction` of the problems are held out, by a hash of their
    ids, so that a file that grows keeps those that were.

    Raises ValueError if either part is empty although `fraction` > 0.
    """
    parts: tuple[list[Trace], list[Trace]] = ([], [])
    for trace in traces:
        parts[_place(trace, seed) < fraction].append(trace)
    training, held_out = parts
    if fraction > 0 and not (training and held_out):
        raise ValueError(
            f"sft.validation_fraction = {fraction}: leaves {len(training)} traces to train on and "
            f"{len(held_out)} to validate with, of {len(traces)} in all; both need some"
        )
    return training, held_out


def _place(trace: Trace, seed: int) -> float:
    """In [0, 1), the same for all traces of a problem."""
    key = f"{seed}/{trace.problem_id or trace.statement}".encode()
    digest = hashlib.blake2b(key, digest_size=HASH_BYTES).digest()
    return int.from_bytes(digest) / 2 ** (8 * HASH_BYTES)


@dataclass(frozen=True)
class Best:
    """The least validation loss of a stage so far; `step` counts the steps before it."""

    step: int
    validation_loss: float


class Validator:
    """Collective: every rank of the trainer makes one and calls it at the same steps.

    `model` is where the weights with the least loss are kept, a Hugging Face directory, and
    `record` the file beside it that says what they are. Both outlive an interruption: a best from
    beyond the checkpoint that a run goes on from holds weights of the same training.
    """

    def __init__(
        self,
        trainer: Trainer,
        traces: Sequence[EncodedTrace],
        config: SftConfig,
        model: Path,
        record: Path,
    ) -> None:
        mine = sft_sequences(traces)[trainer.mesh.dp_rank :: trainer.mesh.dp_size]
        self._batches = trainer.pack(mine, config.microbatch_tokens)
        self._trainer = trainer
        self._every_steps = config.validate_every_steps
        self._model, self._record = model, record
        self.best = Best(**json.loads(record.read_text())) if record.exists() else None

    def after(self, num_steps: int, *, is_last: bool) -> dict[str, float]:
        """Metrics, if a validation is due once `num_steps` are trained; else none."""
        if num_steps % self._every_steps and not is_last:
            return {}
        loss = self.loss()
        if self.best is None or loss < self.best.validation_loss:
            self._keep(Best(num_steps, loss))
        assert self.best is not None
        return {"validation_loss": loss, "validation_loss_best": self.best.validation_loss}

    def loss(self) -> float:
        """Mean cross-entropy of the held-out response tokens, nats, the same on every rank."""
        scores = self._trainer.score(self._batches)
        device = self._batches[0].tokens_T.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # of -logprob, and tokens
        for logprobs_R in scores:
            sums[0] -= logprobs_R.double().sum()
            sums[1] += len(logprobs_R)
        dist.all_reduce(sums, group=self._trainer.mesh.dp_group)
        return float(sums[0] / sums[1])

    def _keep(self, best: Best) -> None:
        self.best = best
        self._trainer.save_hf(self._model)
        if dist.get_rank() == 0:
            partial = self._record.with_name(f"{self._record.name}.partial")
            partial.write_text(json.dumps(asdict(best)) + "\n", encoding="utf-8")
            partial.replace(self._record)
            log.info("step %d: least validation loss so far, %.4f", *asdict(best).values())
