"""Where everything of a run lies. The one place that knows the names.

<run>/config.yaml            the resolved config; config.1.yaml and so on are what it was before
      data/                  problems and traces of a generated world
      models/initial         the model a run starts from, where it has to be made
      models/sft             after the SFT stage
      model/                 the final model, a Hugging Face directory
      checkpoints/<stage>/   the trainers' state (see trainer/checkpoint_files.py)
      finished/<stage>       is there once a stage has ended well
      nonfinite/             batches of steps that were skipped (see trainer/nonfinite.py)
      metrics.jsonl          a line a step; tensorboard/ holds the same
      phase.txt              what the RL stage does now
      samples.jsonl          completions with their rewards
      eval_before_rl.json    held-out results at the start and
      eval_after_rl.json     at the end of the RL stage
      logs/                  a file for each process
      *.lock                 held by the processes that write here
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path

from megatron_magistral.config import Config

LOCK_TIMEOUT_S = 60.0
LOCK_POLL_S = 0.2


class Stage(StrEnum):
    PREPARE = "prepare"
    SFT = "sft"
    RL = "rl"


class RunBusy(RuntimeError):
    """Another process still writes to the run folder."""


@dataclass(frozen=True)
class RunFolder:
    root: Path

    @staticmethod
    def create(config: Config) -> RunFolder:
        """Make a folder named after the run and the time; a second run in one second waits."""
        while True:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            root = (config.run.directory / f"{config.run.name}-{stamp}").resolve()
            try:
                root.mkdir(parents=True)
            except FileExistsError:
                time.sleep(1)
                continue
            (root / "logs").mkdir()
            (root / "models").mkdir()
            return RunFolder(root)

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    def replace_config(self, text: str) -> None:
        """Make `text` the config of the run; what it was is kept beside it."""
        if self.config.read_text(encoding="utf-8") == text:
            return
        former = (self.root / f"config.{number}.yaml" for number in count(1))
        self.config.rename(next(path for path in former if not path.exists()))
        self.config.write_text(text, encoding="utf-8")

    def checkpoints(self, stage: Stage) -> Path:
        return self.root / "checkpoints" / stage

    @property
    def nonfinite(self) -> Path:
        return self.root / "nonfinite"

    def is_finished(self, stage: Stage) -> bool:
        return (self.root / "finished" / stage).exists()

    def mark_finished(self, stage: Stage) -> None:
        """The stage is not to be repeated."""
        marker = self.root / "finished" / stage
        marker.parent.mkdir(exist_ok=True)
        marker.touch()

    def reopen(self, stage: Stage) -> None:
        """The stage goes on beyond what it had ended with."""
        (self.root / "finished" / stage).unlink()

    @contextmanager
    def lock(self, role: str, timeout_s: float | None = None) -> Iterator[None]:
        """Be the only process of this role in the run folder. The kernel releases the lock of a
        process that dies; one that is being ended is waited for.

        Raises RunBusy after `timeout_s`, or LOCK_TIMEOUT_S.
        """
        timeout_s = LOCK_TIMEOUT_S if timeout_s is None else timeout_s
        path = self.root / f"{role}.lock"
        with path.open("ab") as file:
            deadline = time.monotonic() + timeout_s
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise RunBusy(
                            f"{path}: is held by another process after {timeout_s:.0f} s: this run "
                            "is going on elsewhere"
                        ) from None
                time.sleep(LOCK_POLL_S)
            yield

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def initial_model(self) -> Path:
        return self.root / "models" / "initial"

    @property
    def sft_model(self) -> Path:
        return self.root / "models" / "sft"

    def first_model(self, config: Config) -> Path:
        """What the first stage starts from."""
        return config.model.path or self.initial_model

    def rl_model(self, config: Config) -> Path:
        """What the RL stage starts from."""
        return self.sft_model if config.sft is not None else self.first_model(config)

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def phase(self) -> Path:
        return self.root / "phase.txt"

    @property
    def samples(self) -> Path:
        return self.root / "samples.jsonl"

    @property
    def eval_before_rl(self) -> Path:
        return self.root / "eval_before_rl.json"

    @property
    def eval_after_rl(self) -> Path:
        return self.root / "eval_after_rl.json"

    @property
    def verifier_socket(self) -> Path:
        return self.root / "verifier.sock"

    def log(self, role: str) -> Path:
        return self.root / "logs" / f"{role}.log"
