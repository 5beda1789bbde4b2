"""Jobs, plans and run folders for tests that need no SLURM."""

from __future__ import annotations

from pathlib import Path

from megatron_magistral.config import Config
from megatron_magistral.config_file import dump, load
from megatron_magistral.placement import place_roles
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.slurm.job import Job
from megatron_magistral.slurm.plan import JobPlan, Safe, make_plan, write_plan

MICRO = Path(__file__).parents[1] / "micro.yaml"


def job_of(nodes: int = 2, places: int = 2, **changes: object) -> Job:
    values = {
        "id": 7,
        "num_restarts": 0,
        "nodes": tuple(f"n{number}" for number in range(nodes)),
        "places_per_node": places,
        "gpus_per_node": 0,
        "time_left_s": 86400.0,
    }
    return Job(**(values | changes))


def plan_of(job: Job, config: Config | None = None) -> JobPlan:
    placement = place_roles(config or load(MICRO), len(job.nodes), job.places_per_node)
    return make_plan(placement, job, context_length=512, safe=Safe(0, 0))


def planned_run(
    folder: Path, *overrides: str, gpus_per_node: int = 0
) -> tuple[RunFolder, JobPlan, Config]:
    """A run folder as `begin` leaves it: two nodes with two places each."""
    run, config = RunFolder(folder), load(MICRO, overrides)
    folder.mkdir(exist_ok=True)
    run.config.write_text(dump(config))
    plan = plan_of(job_of(gpus_per_node=gpus_per_node), config)
    write_plan(plan, run)
    return run, plan, config
