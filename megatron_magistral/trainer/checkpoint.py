"""When a stage is saved and where it goes on: the ranks of a trainer, together.

    checkpoints = Checkpointer(trainer, folder, config.checkpoint, every_steps=10, training=...)
    progress = checkpoints.restore()
    for step in range(progress.next_step, num_steps):
        ...
        checkpoints.step_done(Progress(step + 1))
    checkpoints.finish()

Every method is collective. A save stops training for a copy to host memory. A thread of each rank
writes the copy while training goes on; the next `poll` or step after the last rank has written
makes it the latest checkpoint. What is a file and when a checkpoint counts: `checkpoint_files.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from megatron_magistral.config_stages import CheckpointConfig
from megatron_magistral.trainer.checkpoint_files import (
    CheckpointError,
    CheckpointFolder,
    FileDigest,
    SavedState,
)
from megatron_magistral.trainer.megatron_checkpoint import SnapshotWrite, TrainerState, load
from megatron_magistral.trainer.step import Trainer
from megatron_magistral.types import Progress

log = logging.getLogger(__name__)

POLL_S = 0.5

T = TypeVar("T")


class StopRequested(RuntimeError):
    """The run was asked to stop, and everything up to `step` is saved."""

    def __init__(self, step: int) -> None:
        super().__init__(f"asked to stop: saved after step {step}")


class _WriteStatus(StrEnum):
    WRITING = "writing"
    WRITTEN = "written"
    FAILED = "failed"


@dataclass(frozen=True)
class _Report:
    """How far one rank's thread is."""

    status: _WriteStatus
    failure: str | None


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is being written."""

    state: SavedState
    write: SnapshotWrite
    begin: float

    @property
    def step(self) -> int:
        return self.state.progress.next_step


class Checkpointer:
    """`training` holds what a run that goes on must agree on with the run that was saved. Once the
    file `stop` exists, the next step is the last."""

    def __init__(
        self,
        trainer: Trainer,
        folder: CheckpointFolder,
        config: CheckpointConfig,
        *,
        every_steps: int,
        training: Mapping[str, Any],
        stop: Path | None = None,
    ) -> None:
        self._folder = folder
        self._stop = stop
        self._config = config
        self._every_steps = every_steps
        self._training = dict(training)
        self._layout = asdict(trainer.layout)
        self._state = TrainerState(trainer.model, trainer.optimizer, trainer.average)
        self._speaks = dist.get_rank() == 0
        self._saved_step = 0
        self._progress = Progress()
        self._pending: _Pending | None = None

    def restore(self) -> Progress:
        """Loads the latest checkpoint, if there is one; says where the stage goes on.

        Raises CheckpointError, the same on every rank, if it is damaged or of another training.
        """
        step = self._by_one(self._latest)
        if step is None:
            return self._progress
        self._folder.check_training(step, self._training)
        self._verify(step)
        saved = self._folder.state(step)
        same_layout = saved.layout == self._layout
        load(self._state, self._folder.path(step), same_layout=same_layout)
        if self._speaks:
            in_layout = "" if same_layout else f", which was saved in layout {saved.layout}"
            log.info("go on from %s%s", self._folder.path(step), in_layout)
        self._saved_step, self._progress = step, saved.progress
        return self._progress

    def step_done(self, progress: Progress) -> None:
        """Call after every step. Saves when one is due; completes a save that has been written.

        Raises StopRequested, after saving, if the run is to stop.
        """
        self._progress = progress
        self.poll()
        if self._by_one(lambda: self._stop is not None and self._stop.exists()):
            self.stop()
        if self._every_steps and progress.next_step % self._every_steps == 0:
            self.save()

    def stop(self) -> NoReturn:
        """Saves what has been done, and raises StopRequested."""
        self.finish()
        raise StopRequested(self._progress.next_step)

    def poll(self) -> None:
        """Completes a save that every rank has written; returns at once if there is none."""
        if self._pending is not None and self._all_written(self._reports(wait_s=0.0)):
            self._complete()

    def save(self) -> None:
        """Begins to save the present state. Waits for an earlier save that is still written."""
        self.wait()
        if not self._state.has_updates:
            step = self._progress.next_step
            log.warning("step %d: not saved: no step has changed the weights yet", step)
            return
        begin = time.monotonic()
        state = SavedState(self._progress, self._layout, self._training)
        directory = self._by_one(lambda: self._folder.begin(self._progress.next_step))
        self._pending = _Pending(state, SnapshotWrite(self._state, directory), begin)
        if self._speaks:
            stopped_s = time.monotonic() - begin
            log.info("step %d: copied in %.2f s", self._progress.next_step, stopped_s)

    def wait(self) -> None:
        """Completes the save that is being written, if any.

        Raises CheckpointError if a rank could not write, or has not after the config's timeout.
        """
        if self._pending is None:
            return
        begin = time.monotonic()
        while True:
            reports = self._reports(wait_s=POLL_S)
            if self._all_written(reports):
                break
            # Of one clock, so that all ranks give up together.
            waited_s = self._by_one(lambda: time.monotonic() - begin)
            if waited_s > self._config.timeout_s:
                late = [
                    rank
                    for rank, report in enumerate(reports)
                    if report.status is _WriteStatus.WRITING
                ]
                raise CheckpointError(
                    f"checkpoint of step {self._pending.step}: ranks {late} are still writing "
                    f"after training has waited {waited_s:.0f} s for them"
                )
        self._complete()

    def finish(self) -> None:
        """Saves the last step, unless it is saved already, and waits until that is complete."""
        self.wait()
        if self._progress.next_step > self._saved_step:
            self.save()
            self.wait()

    # --- the parts of it ----------------------------------------------------------------------

    def _latest(self) -> int | None:
        if leftovers := self._folder.recover():
            log.info("deleted what an interrupted process had left: %s", ", ".join(leftovers))
        return self._folder.latest()

    def _verify(self, step: int) -> None:
        """Each rank reads its share of the files; they fail together."""
        names = self._folder.files(step)
        failure: CheckpointError | None = None
        try:
            self._folder.verify(step, names[dist.get_rank() :: dist.get_world_size()])
        except CheckpointError as error:
            failure = error
        everyone: list[CheckpointError | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, failure)
        for found in everyone:
            if found is not None:
                raise found

    def _reports(self, wait_s: float) -> list[_Report]:
        """Of every rank, after this one has waited for its own thread for at most `wait_s`."""
        assert self._pending is not None
        write = self._pending.write
        write.thread.join(wait_s)
        status = _WriteStatus.WRITING
        if not write.thread.is_alive():
            status = _WriteStatus.WRITTEN if write.failure is None else _WriteStatus.FAILED
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, _Report(status, write.failure))
        return reports

    def _all_written(self, reports: list[_Report]) -> bool:
        """Raises CheckpointError if a rank has failed."""
        assert self._pending is not None
        for rank, report in enumerate(reports):
            if report.status is _WriteStatus.FAILED:
                raise CheckpointError(
                    f"checkpoint of step {self._pending.step}: rank {rank} could not write its "
                    f"part: {report.failure}"
                )
        return all(report.status is _WriteStatus.WRITTEN for report in reports)

    def _complete(self) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        pending.write.finalise()
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, pending.write.digests)
        merged: dict[str, FileDigest] = {}
        for each in digests:
            merged |= each

        def commit() -> None:
            self._folder.commit(pending.step, pending.state, merged)
            keep_multiples_of = self._config.keep_every * self._every_steps
            self._folder.prune(self._config.keep_last, keep_multiples_of)

        self._by_one(commit)
        self._saved_step = pending.step
        if self._speaks:
            log.info(
                "step %d: saved: written in %.2f s, complete %.2f s after it began",
                pending.step,
                pending.write.elapsed_s,
                time.monotonic() - pending.begin,
            )

    def _by_one(self, function: Callable[[], T]) -> T:
        """What the function returns on rank 0, on every rank; if it fails there, all fail."""
        outcome: list[Any] = [None, None]
        if self._speaks:
            try:
                outcome[0] = function()
            except CheckpointError as error:
                outcome[1] = str(error)
            except OSError as error:
                outcome[1] = f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise CheckpointError(outcome[1])
        return outcome[0]
