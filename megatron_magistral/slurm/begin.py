"""The first thing a job does, on its first node: refuse what cannot run, then say who runs where.

A job that finds its run folder goes on with it: the folder is named after the job, so a requeued
job resumes, and `RUN=...` of another job does too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_magistral.config import Config
from megatron_magistral.config_file import ConfigError, dump, load
from megatron_magistral.launcher import reopen, unfinished_stage
from megatron_magistral.placement import PlacementError, place_roles
from megatron_magistral.preflight import Refused, check_inputs
from megatron_magistral.run_folder import RunFolder, Stage, stages_of
from megatron_magistral.slurm.job import Job, JobError
from megatron_magistral.slurm.plan import JobPlan, Safe, make_plan, write_plan
from megatron_magistral.trainer.checkpoint_files import CheckpointFolder
from megatron_magistral.trainer.fingerprint import all_values, differences

ENDED_STATES = frozenset(
    {
        "",
        "COMPLETED",
        "FAILED",
        "CANCELLED",
        "TIMEOUT",
        "NODE_FAIL",
        "BOOT_FAIL",
        "PREEMPTED",
        "OUT_OF_MEMORY",
        "DEADLINE",
    }
)
# Where a run lies says nothing of what it is.
PLACES = frozenset({"run.directory"})


def begin(
    job: Job,
    config_path: Path,
    overrides: Sequence[str],
    run_path: Path,
    *,
    min_time_s: float,
    allow_changes: bool,
    owner_state: str,
    console: Console,
) -> JobPlan:
    """Open or make the run folder, and write the plan of this attempt into it.

    `owner_state` is SLURM's word for the job that had the run folder before, empty if it knows
    none. Raises ConfigError, PlacementError, JobError, Refused, CheckpointError or RunBusy, before
    anything is started.
    """
    config = load(config_path, overrides)
    for warning in config.warnings():
        console.print(f"warning: {warning}", markup=False)
    try:
        placement = place_roles(config, len(job.nodes), job.places_per_node)
    except PlacementError as error:
        raise PlacementError(f"{config_path}: {error} (nodes: --nodes)") from error
    check_time(job, min_time_s)
    inputs = check_inputs(config)
    for warning in inputs.warnings:
        console.print(f"warning: {warning}", markup=False)
    run = RunFolder(run_path.resolve())
    if run.config.is_file():
        check_owner(run, job, owner_state)
        check_changes(config, run, allow_changes, console)
        reopen(config, run, console, sizes_only=True)
    else:
        _make(run, config)
    owner_path(run).write_text(f"{job.id}\n", encoding="utf-8")
    plan = make_plan(
        placement,
        job,
        context_length=inputs.context_length,
        safe=what_is_safe(config, run),
    )
    write_plan(plan, run)
    return plan


def check_time(job: Job, min_time_s: float) -> None:
    """Raises JobError where the job would end before it has done anything that is kept."""
    if job.time_left_s < min_time_s:
        raise JobError(
            f"the time limit leaves {job.time_left_s / 60:.1f} min, at least "
            f"{min_time_s / 60:.1f} min are needed to start, take a step and save it: "
            "submit with a longer --time"
        )


def check_owner(run: RunFolder, job: Job, owner_state: str) -> None:
    """Raises Refused if another job still has the run. A job that has ended leaves it to us."""
    try:
        owner = owner_path(run).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return
    if owner != str(job.id) and owner_state not in ENDED_STATES:
        raise Refused(
            f"{run.root}: belongs to job {owner}, which is {owner_state}; `scancel {owner}` ends "
            "it, or give this job another run folder"
        )


def check_changes(config: Config, run: RunFolder, allow: bool, console: Console) -> None:
    """Raises ConfigError naming what differs from the run's config, unless that is allowed.

    What is allowed is still refused by `reopen` if it makes another training of it.
    """
    had, now = all_values(load(run.config, check_files=False)), all_values(config)
    changed = differences(*({k: v for k, v in x.items() if k not in PLACES} for x in (had, now)))
    if not changed:
        return
    listed = "; ".join(changed)
    if not allow:
        raise ConfigError(
            f"{run.config}: the config has changed since the run began: {listed}. Put it back, or "
            "submit with ALLOW_CHANGES=1 to go on with the new one"
        )
    console.print(f"goes on with a changed config: {listed}", markup=False, highlight=False)


def what_is_safe(config: Config, run: RunFolder) -> Safe:
    ended = [stage for stage in Stage if run.is_finished(stage)]
    stage = unfinished_stage(config, run)
    if stage is None:
        return Safe(len(ended), 0)
    if stage is Stage.SELECTION:  # what it has measured counts as steps
        return Safe(len(ended), run.num_measured)
    return Safe(len(ended), CheckpointFolder(run.checkpoints(stage)).latest() or 0)


def stages_left(config: Config, run: RunFolder) -> list[Stage]:
    first = unfinished_stage(config, run)
    wanted = stages_of(config)
    return wanted[wanted.index(first) :] if first is not None else []


def owner_path(run: RunFolder) -> Path:
    return run.root / "slurm" / "owner"


def _make(run: RunFolder, config: Config) -> None:
    try:
        for folder in ("logs", "models", "slurm"):
            (run.root / folder).mkdir(parents=True, exist_ok=True)
        draft = run.root / f".config.{os.getpid()}"
        draft.write_text(dump(config), encoding="utf-8")
        draft.replace(run.config)
    except OSError as error:
        raise Refused(f"{run.root}: no run folder can be made there: {error.strerror}") from error
