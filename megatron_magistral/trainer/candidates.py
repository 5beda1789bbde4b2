"""Model directories of the SFT stage, of which the stage after it keeps the best one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_magistral.trainer.step import Trainer


class CandidateWriter:
    """Collective: every rank of the trainer makes one and calls it after every step. `folder` says
    where the weights after so many steps are kept."""

    def __init__(self, trainer: Trainer, every_steps: int, folder: Callable[[int], Path]) -> None:
        self._trainer, self._every_steps, self._folder = trainer, every_steps, folder

    def after(self, num_steps: int, *, is_last: bool) -> dict[str, float]:
        if num_steps % self._every_steps == 0 or is_last:
            self._trainer.save_hf(self._folder(num_steps))
        return {}
