"""Where everything of a run lies. The one place that knows the names.

<run>/config.yaml            the resolved config; config.1.yaml and so on are what it was before
      data/                  problems and traces of a generated world
      models/initial         the model a run starts from, where it has to be made
      models/sft             after the SFT stage; its best weights where it validates
      models/sft_best.json   which these are
      models/candidates/     weights of the SFT stage, of which `selection` keeps the best
      models/sft_selected.json   which these are; eval_candidates/ holds the results of each
      model/                 the final model, a Hugging Face directory
      checkpoints/<stage>/   the trainers' state (see trainer/checkpoint_files.py)
      finished/<stage>       is there once a stage has ended well
      nonfinite/             batches of steps that were skipped (see trainer/nonfinite.py)
      metrics.jsonl          a line a step; tensorboard/ holds the same
      journal/               what happened to every prompt group (see rollout/journal.py)
      phase.txt              what the RL stage does now
      samples.jsonl          completions with their rewards
      curriculum.jsonl       which stage of rl.stages began when, and why (see rollout/stages.py)
      pass_rates.jsonl       how often each problem was solved (see data/pass_rates.py)
      eval_before_rl.json    held-out results at the start and
      eval_after_rl.json     at the end of the RL stage
      evaluations/           held-out results in between, a file a version
      metrics_url            where Prometheus finds the RL stage's metrics while it runs
      logs/                  a file for each process
      stop_requested         asks the run to save and stop
      restarts/              requests to restart a process (see restart_requests.py)
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

LOCK_TIMEOUT_S = 45.0
LOCK_POLL_S = 0.2


class Stage(StrEnum):
    PREPARE = "prepare"
    SFT = "sft"
    SELECTION = "selection"
    RL = "rl"


def stages_of(config: Config) -> list[Stage]:
    """The stages that a run with this config has, in order."""
    wanted = {
        Stage.PREPARE: True,
        Stage.SFT: config.sft is not None,
        Stage.SELECTION: config.selects,
        Stage.RL: config.rl is not None,
    }
    return [stage for stage in Stage if wanted[stage]]


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
        """Make `text` the config of the run; what it was is kept beside it. At every moment there
        is one, since a folder without is no run."""
        had = self.config.read_text(encoding="utf-8")
        if had == text:
            return
        former = (self.root / f"config.{number}.yaml" for number in count(1))
        next(path for path in former if not path.exists()).write_text(had, encoding="utf-8")
        draft = self.root / "config.yaml.partial"
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.config)

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

    @property
    def sft_best(self) -> Path:
        return self.root / "models" / "sft_best.json"

    def sft_candidate(self, step: int) -> Path:
        return self.root / "models" / "candidates" / f"step-{step:06d}"

    def sft_candidates(self) -> dict[int, Path]:
        """Those that are there, by the steps that they were trained for."""
        folder = self.root / "models" / "candidates"
        paths = [path for path in folder.glob("step-*") if path.name[5:].isdigit()]
        return {int(path.name[5:]): path for path in sorted(paths)}

    def eval_candidate(self, step: int) -> Path:
        return self.root / "eval_candidates" / f"step-{step:06d}.json"

    @property
    def num_measured(self) -> int:
        """Candidates whose results are there."""
        return sum(self.eval_candidate(step).exists() for step in self.sft_candidates())

    @property
    def sft_selected(self) -> Path:
        return self.root / "models" / "sft_selected.json"

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
    def stop_requested(self) -> Path:
        """Asks the run to stop at the next step boundary, with a checkpoint."""
        return self.root / "stop_requested"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def phase(self) -> Path:
        return self.root / "phase.txt"

    @property
    def curriculum(self) -> Path:
        return self.root / "curriculum.jsonl"

    @property
    def pass_rates(self) -> Path:
        return self.root / "pass_rates.jsonl"

    @property
    def samples(self) -> Path:
        return self.root / "samples.jsonl"

    @property
    def eval_before_rl(self) -> Path:
        return self.root / "eval_before_rl.json"

    @property
    def eval_after_rl(self) -> Path:
        return self.root / "eval_after_rl.json"

    def evaluation(self, version: int) -> Path:
        """Of weights that were evaluated beside training; the folder is made."""
        path = self.root / "evaluations" / f"version-{version:08d}.json"
        path.parent.mkdir(exist_ok=True)
        return path

    @property
    def metrics_url(self) -> Path:
        return self.root / "metrics_url"

    @property
    def verifier_socket(self) -> Path:
        return self.root / "verifier.sock"

    @property
    def restarts(self) -> Path:
        return self.root / "restarts"

    def log(self, role: str) -> Path:
        return self.root / "logs" / f"{role}.log"
