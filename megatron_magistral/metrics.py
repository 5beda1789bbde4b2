"""Numbers of a run: one JSON line a step, and the same to TensorBoard.

`metrics.jsonl` is the record that everything else reads: the live view, the final table, tests.
A stage that goes on after a checkpoint first takes back what was recorded after it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from megatron_magistral.jsonl import keep_rows


class MetricsWriter:
    """Appends to <run>/metrics.jsonl and <run>/tensorboard. One writer a stage, which begins with
    step `first_step`: what either holds of later steps of the stage is dropped."""

    def __init__(self, run_dir: Path, stage: str, first_step: int = 0) -> None:
        self._stage = stage
        path = run_dir / "metrics.jsonl"
        keep_rows(path, lambda row: row["stage"] != stage or row["step"] < first_step)
        self._file = path.open("a", encoding="utf-8")
        board = run_dir / "tensorboard" / stage
        purge_step = first_step if board.exists() else None
        self._board = SummaryWriter(str(board), purge_step=purge_step)

    def write(self, step: int, values: Mapping[str, float], **extra: Any) -> None:
        """Record one step. `extra` goes to the JSON line only."""
        row = {"stage": self._stage, "step": step, "time": time.time(), **extra, **values}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{self._stage}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()
