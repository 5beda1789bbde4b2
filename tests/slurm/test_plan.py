"""The plan of an attempt: what every role reads, and what srun is given."""

from __future__ import annotations

from pathlib import Path

from megatron_magistral.slurm.plan import RoleName, Task, attempt_folder, read_plan
from tests.slurm.jobs import job_of, plan_of, planned_run


def test_trainers_come_first_then_generators_and_verifiers_are_everywhere() -> None:
    tasks = plan_of(job_of()).tasks
    assert tasks[RoleName.TRAINER] == (Task("n0", 0), Task("n0", 1))
    assert tasks[RoleName.GENERATOR] == (Task("n1", 0),)
    assert tasks[RoleName.VERIFIER] == (Task("n0", 0), Task("n1", 0))
    assert tasks[RoleName.CONTROLLER] == (Task("n0", 0),)


def test_on_one_node_a_generator_begins_after_the_trainers() -> None:
    plan = plan_of(job_of(nodes=1, places=3))
    assert plan.at(RoleName.GENERATOR, 0) == Task("n0", 2)


def test_roles_read_the_plan_that_was_written(tmp_path: Path) -> None:
    run, plan, _ = planned_run(tmp_path)
    assert read_plan(run, plan.attempt) == plan


def test_a_host_file_has_a_line_for_each_task_in_its_order(tmp_path: Path) -> None:
    run, plan, _ = planned_run(tmp_path)
    folder = attempt_folder(run, plan.attempt)
    assert (folder / "trainer.hosts").read_text() == "n0\nn0\n"
    assert (folder / "generator.hosts").read_text() == "n1\n"
