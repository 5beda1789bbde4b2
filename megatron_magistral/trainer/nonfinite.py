"""Steps whose loss or gradient was not finite: what they were trained on, and when to give up.

`Trainer.train_minibatch` leaves the weights as they were. Here the batch is kept, so that somebody
can find out what was wrong with it, and a run that only skips is ended.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megatron_magistral.trainer.step import StepStats, StepStatus
from megatron_magistral.types import TrainSequence

log = logging.getLogger(__name__)

MAX_KEPT_BATCHES = 8
"""Of one data-parallel rank; older ones make room."""


class NonFiniteSteps(RuntimeError):
    """Too many steps in a row were skipped: says which, with what loss and gradient."""


class KeptBatch(msgspec.Struct, frozen=True):
    """What one data-parallel rank was given in a step that was skipped."""

    stage: str
    step: int
    minibatch: int
    loss: float
    grad_norm: float
    sequences: tuple[TrainSequence, ...]


class NonFiniteWatch:
    """Looks at every optimizer step of a stage. Statistics are the same on all ranks, so that all
    of them give up together. `folder` is given on one rank of each data-parallel replica."""

    def __init__(self, stage: str, max_steps: int, folder: Path | None, data_rank: int) -> None:
        self._stage = stage
        self._max_steps = max_steps
        self._folder = folder
        self._data_rank = data_rank
        self._in_a_row = 0

    def look(
        self, step: int, stats: Sequence[StepStats], batches: Sequence[Sequence[TrainSequence]]
    ) -> None:
        """`batches` are what this rank trained in the optimizer steps that `stats` are of.

        Raises NonFiniteSteps after `max_steps` optimizer steps in a row that were skipped.
        """
        for minibatch, (item, sequences) in enumerate(zip(stats, batches, strict=True)):
            if item.status is not StepStatus.NON_FINITE:
                self._in_a_row = 0
                continue
            self._in_a_row += 1
            log.warning(
                "%s step %d: skipped, since its loss is %s and its gradient norm %s",
                self._stage,
                step,
                item.loss,
                item.grad_norm,
            )
            kept = KeptBatch(
                self._stage, step, minibatch, item.loss, item.grad_norm, tuple(sequences)
            )
            self._keep(kept)
            if self._in_a_row >= self._max_steps:
                where = f"; the batches are in {self._folder}" if self._folder else ""
                raise NonFiniteSteps(
                    f"{self._stage} step {step}: {self._in_a_row} optimizer steps in a row were "
                    f"skipped, the last with loss {item.loss} and gradient norm "
                    f"{item.grad_norm}{where}"
                )

    def _keep(self, batch: KeptBatch) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(exist_ok=True)
        ours = f"rank-{self._data_rank}-{self._stage}-step-"
        name = f"{ours}{batch.step:08d}-{batch.minibatch}.msgpack"
        (self._folder / name).write_bytes(msgspec.msgpack.encode(batch))
        for path in sorted(self._folder.glob(f"{ours}*"))[:-MAX_KEPT_BATCHES]:
            path.unlink()


def read_kept_batch(path: Path) -> KeptBatch:
    """Not a number and infinity come back as they were."""
    return msgspec.msgpack.decode(path.read_bytes(), type=KeptBatch)
