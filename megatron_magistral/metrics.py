"""Numbers of a run: one JSON line a step, and the same to TensorBoard.

`metrics.jsonl` is the record that everything else reads: the live view, the final table, tests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class MetricsWriter:
    """Appends to <run>/metrics.jsonl and <run>/tensorboard. One writer a stage."""

    def __init__(self, run_dir: Path, stage: str) -> None:
        self._stage = stage
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run_dir / "tensorboard" / stage))

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
