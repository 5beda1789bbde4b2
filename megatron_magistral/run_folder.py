"""Where everything of a run lies. The one place that knows the names.

<run>/config.yaml            the resolved config
      data/                  problems and traces of a generated world
      models/initial         the model a run starts from, where it has to be made
      models/sft             after the SFT stage
      model/                 the final model, a Hugging Face directory
      metrics.jsonl          a line a step; tensorboard/ holds the same
      phase.txt              what the RL stage does now
      samples.jsonl          completions with their rewards
      eval_before_rl.json    held-out results at the start and
      eval_after_rl.json     at the end of the RL stage
      logs/                  a file for each process
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from megatron_magistral.config import Config


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
