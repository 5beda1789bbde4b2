"""The three files of a run, read with every bad row reported and set aside."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_magistral.config import Config
from megatron_magistral.data.schema import BadRow, read_problems, read_traces
from megatron_magistral.data.tiny_world import (
    PROBLEMS_HELD_OUT_FILE,
    PROBLEMS_TRAIN_FILE,
    TRACES_FILE,
)
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.types import Problem, Trace

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetPaths:
    """Where a run's data lies; None for what no stage of it needs."""

    train: Path | None
    held_out: Path | None
    traces: Path | None


@dataclass(frozen=True)
class Datasets:
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    traces: tuple[Trace, ...]

    @staticmethod
    def read(paths: DatasetPaths) -> Datasets:
        """Read what is there; log each row set aside. Raises ValueError for an empty set."""
        return Datasets(
            train=_problems(paths.train),
            held_out=_problems(paths.held_out),
            traces=_traces(paths.traces),
        )


def dataset_paths(config: Config, run: RunFolder) -> DatasetPaths:
    if config.data.tiny_world is not None:
        return DatasetPaths(
            train=run.data / PROBLEMS_TRAIN_FILE,
            held_out=run.data / PROBLEMS_HELD_OUT_FILE,
            traces=run.data / TRACES_FILE,
        )
    return DatasetPaths(config.data.train, config.data.held_out, config.data.traces)


def harder_problems(config: Config, train: Sequence[Problem]) -> list[tuple[Problem, ...]]:
    """What comes in with each later stage of the curriculum.

    Raises ValueError for an id that was used before.
    """
    used = {problem.id for problem in train}
    stages = []
    for stage in config.rl.stages if config.rl is not None else ():
        problems = _problems(stage.add_problems)
        if shared := [problem.id for problem in problems if problem.id in used]:
            raise ValueError(
                f"{stage.add_problems}: {len(shared)} of its ids are used by earlier problems, "
                f"the first: {shared[0]!r}; give each problem an id of its own"
            )
        used |= {problem.id for problem in problems}
        stages.append(problems)
    return stages


def _problems(path: Path | None) -> tuple[Problem, ...]:
    if path is None:
        return ()
    read = read_problems(path)
    _report(path, len(read.rows), read.bad)
    return read.rows


def _traces(path: Path | None) -> tuple[Trace, ...]:
    if path is None:
        return ()
    read = read_traces(path)
    _report(path, len(read.rows), read.bad)
    return read.rows


def _report(path: Path, num_rows: int, bad: Sequence[BadRow]) -> None:
    for row in bad:
        log.warning("set aside %s", row)
    log.info("%s: %d rows read, %d set aside", path, num_rows, len(bad))
    if num_rows == 0:
        raise ValueError(f"{path}: holds no usable row ({len(bad)} were set aside)")
