"""What SLURM and launch/lib say of the job, read once from the environment.

Only the batch script calls SLURM's own commands, since they may be missing in a container:

    SLURM_JOB_ID SLURM_RESTART_COUNT    from SLURM
    MAGISTRAL_NODES                     names, comma-separated, first the one of the batch script
    MAGISTRAL_PLACES_PER_NODE           processes that a node has room for: one a GPU
    MAGISTRAL_GPUS_PER_NODE             0 where nodes have none
    MAGISTRAL_TIME_LEFT                 of the job, as `squeue -o %L` prints it
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

UNLIMITED_WORDS = ("UNLIMITED", "NOT_SET")
_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(?:(\d+):)?(\d+)")


class JobError(RuntimeError):
    """The job as it was submitted cannot run; says what to change."""


@dataclass(frozen=True)
class Job:
    id: int
    num_restarts: int
    nodes: tuple[str, ...]
    places_per_node: int
    gpus_per_node: int
    """0: the roles compute on CPUs."""
    time_left_s: float

    @property
    def attempt(self) -> str:
        """Names this start of the job: a requeued job keeps its id."""
        return f"{self.id}.{self.num_restarts}"


def read_job(environment: Mapping[str, str]) -> Job:
    """Raises JobError outside of a job of launch/, or where its directives contradict."""
    places = _number(environment, "MAGISTRAL_PLACES_PER_NODE", "submit with --ntasks-per-node")
    gpus = _number(environment, "MAGISTRAL_GPUS_PER_NODE", default=0)
    if gpus and gpus != places:
        raise JobError(
            f"--gpus-per-node={gpus} and --ntasks-per-node={places}: every GPU takes one process, "
            "so the two must be equal"
        )
    return Job(
        id=_number(environment, "SLURM_JOB_ID", "this runs inside of a job: sbatch launch/..."),
        num_restarts=_number(environment, "SLURM_RESTART_COUNT", default=0),
        nodes=tuple(_text(environment, "MAGISTRAL_NODES").split(",")),
        places_per_node=places,
        gpus_per_node=gpus,
        time_left_s=duration_s(_text(environment, "MAGISTRAL_TIME_LEFT")),
    )


def duration_s(text: str) -> float:
    """Seconds of SLURM's [days-][hours:][minutes:]seconds; infinite if unlimited.

    Raises JobError for anything else. With days, what follows are hours first: 1-2 is 26 hours.
    """
    if text in UNLIMITED_WORDS:
        return math.inf
    match = _DURATION.fullmatch(text)
    if match is None:
        raise JobError(f"{text!r}: is no time as SLURM writes it, like 1-02:03:04")
    days = int(match[1] or 0)
    fields = [int(field) for field in text.rpartition("-")[2].split(":")]
    units = (3600, 60, 1) if match[1] else (3600, 60, 1)[-len(fields) :]
    return days * 86400.0 + sum(n * unit for n, unit in zip(fields, units, strict=False))


def _text(environment: Mapping[str, str], name: str, remedy: str = "launch/lib sets it") -> str:
    value = environment.get(name, "")
    if not value:
        raise JobError(f"{name} is not set: {remedy}")
    return value


def _number(
    environment: Mapping[str, str], name: str, remedy: str = "", *, default: int | None = None
) -> int:
    if default is not None and not environment.get(name):
        return default
    text = _text(environment, name, remedy)
    if not text.isdecimal():
        raise JobError(f"{name} = {text!r}: must be a whole number")
    return int(text)
