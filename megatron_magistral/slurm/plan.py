"""Who runs where in one attempt of a job: `place_roles`, with the job's nodes for numbers.

<run>/slurm/<job>.<restart>/       an attempt: a job that is requeued keeps its number
    plan.json                      read by every role
    <role>.hosts                   a line a task, for `srun --distribution=arbitrary`
    preflight/<node>.json          what each node says of itself
    <stage>/<role>-<index>         addresses of the roles (see address_book.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_magistral.placement import Placement
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.slurm.job import Job


class RoleName(StrEnum):
    PREPARE = "prepare"
    GENERATOR = "generator"
    VERIFIER = "verifier"
    CONTROLLER = "controller"
    TRAINER = "trainer"


class Task(msgspec.Struct, frozen=True):
    """One process of a role. `place` is its first GPU, or place for a process, on its node."""

    node: str
    place: int


class Safe(NamedTuple):
    """What need not be done again: stages that have ended, saved steps of the one that goes on."""

    num_stages: int
    num_steps: int


class JobPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    attempt: str
    nodes: tuple[str, ...]
    places_per_node: int
    gpus_per_node: int
    """0: everything computes on CPUs."""
    context_length: int
    """Tokens that prompt and completion may have together."""
    safe: Safe
    """When the attempt began."""
    tasks: Mapping[RoleName, tuple[Task, ...]]

    def at(self, role: RoleName, index: int) -> Task:
        return self.tasks[role][index]


def make_plan(placement: Placement, job: Job, *, context_length: int, safe: Safe) -> JobPlan:
    """SLURM numbers the tasks of a host file in the order of its lines, and nodes in the order of
    the job's, which is the placement's too."""
    names = job.nodes
    whole_nodes = {
        RoleName.PREPARE: (placement.controller_node,),
        RoleName.CONTROLLER: (placement.controller_node,),
        RoleName.VERIFIER: placement.verifier_nodes,
    }
    tasks = {role: tuple(Task(names[n], 0) for n in nodes) for role, nodes in whole_nodes.items()}
    tasks[RoleName.TRAINER] = tuple(Task(names[g.node], g.index) for g in placement.trainers)
    tasks[RoleName.GENERATOR] = tuple(
        Task(names[r.node], r.gpus[0].index) for r in placement.generators
    )
    return JobPlan(
        attempt=job.attempt,
        nodes=names,
        places_per_node=job.places_per_node,
        gpus_per_node=job.gpus_per_node,
        context_length=context_length,
        safe=safe,
        tasks=tasks,
    )


def attempt_folder(run: RunFolder, attempt: str) -> Path:
    return run.root / "slurm" / attempt


def write_plan(plan: JobPlan, run: RunFolder) -> None:
    folder = attempt_folder(run, plan.attempt)
    (folder / "preflight").mkdir(parents=True, exist_ok=True)
    for role, tasks in plan.tasks.items():
        lines = [f"{task.node}\n" for task in tasks]
        (folder / f"{role}.hosts").write_text("".join(lines), encoding="utf-8")
    encoded = msgspec.json.format(msgspec.json.encode(plan), indent=1)
    (folder / "plan.json").write_bytes(encoded)


def read_plan(run: RunFolder, attempt: str) -> JobPlan:
    path = attempt_folder(run, attempt) / "plan.json"
    return msgspec.json.decode(path.read_bytes(), type=JobPlan)
