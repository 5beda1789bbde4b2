"""The first thing of a job: what cannot run is one message, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from megatron_magistral.config_file import ConfigError, load
from megatron_magistral.placement import PlacementError
from megatron_magistral.preflight import Refused
from megatron_magistral.run_folder import RunBusy, RunFolder, Stage
from megatron_magistral.slurm.begin import begin, owner_path, stages_left, what_is_safe
from megatron_magistral.slurm.job import Job, JobError
from megatron_magistral.slurm.plan import JobPlan, RoleName, Safe
from megatron_magistral.trainer.checkpoint_files import (
    CheckpointError,
    CheckpointFolder,
    SavedState,
)
from megatron_magistral.trainer.fingerprint import training_values
from megatron_magistral.types import Progress
from tests.slurm.jobs import MICRO, job_of


def start(
    folder: Path, *overrides: str, job: Job | None = None, allow: bool = False, owner: str = ""
) -> tuple[JobPlan, str]:
    """The plan, and what was said."""
    console = Console(soft_wrap=True, record=True)
    plan = begin(
        job or job_of(),
        MICRO,
        overrides,
        folder / "run",
        min_time_s=1200.0,
        allow_changes=allow,
        owner_state=owner,
        console=console,
    )
    return plan, console.export_text()


def begun(folder: Path) -> RunFolder:
    """A run of which SFT has two checkpoints, without tensors."""
    start(folder)
    run = RunFolder(folder / "run")
    run.mark_finished(Stage.PREPARE)
    checkpoints = CheckpointFolder(run.checkpoints(Stage.SFT))
    for step in (20, 40):
        (checkpoints.begin(step) / "__0_0.distcp").write_bytes(b"tensors")
        state = SavedState(Progress(step), {}, training_values(load(MICRO), "sft"))
        checkpoints.commit(step, state, {})
    return run


def test_a_new_job_gets_a_run_folder_with_its_config_and_plan(tmp_path: Path) -> None:
    plan, _ = start(tmp_path, "rl.num_steps=9")
    run = RunFolder(tmp_path / "run")
    assert load(run.config) == load(MICRO, ["rl.num_steps=9"])
    assert len(plan.tasks[RoleName.TRAINER]) == 2
    assert stages_left(load(run.config), run) == [Stage.PREPARE, Stage.SFT, Stage.RL]


def test_nodes_that_do_not_fit_are_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"nodes = 3: .* would be idle"):
        start(tmp_path, job=job_of(nodes=3))
    assert not (tmp_path / "run").exists()


def test_a_time_limit_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"leaves 5\.0 min, at least 20\.0 min .* longer --time"):
        start(tmp_path, job=job_of(time_left_s=300.0))


def test_a_requeued_job_goes_on_after_its_latest_checkpoint(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.stop_requested.touch()
    plan, said = start(tmp_path, job=job_of(num_restarts=1))
    assert "sft goes on after step 40" in said
    assert (plan.attempt, plan.safe) == ("7.1", Safe(1, 40))
    assert stages_left(load(run.config), run) == [Stage.SFT, Stage.RL]
    assert not run.stop_requested.exists()  # it was for the attempt before


def test_a_half_written_checkpoint_is_not_gone_on_from(tmp_path: Path) -> None:
    run = begun(tmp_path)
    checkpoints = CheckpointFolder(run.checkpoints(Stage.SFT))
    (checkpoints.begin(60) / "__0_0.distcp").write_bytes(b"ten")
    plan, said = start(tmp_path)
    assert "sft goes on after step 40" in said
    assert plan.safe.num_steps == 40


def test_a_damaged_checkpoint_is_named_with_the_step_to_go_back_to(tmp_path: Path) -> None:
    run = begun(tmp_path)
    path = CheckpointFolder(run.checkpoints(Stage.SFT)).path(40) / "__0_0.distcp"
    path.write_bytes(b"ten")
    with pytest.raises(CheckpointError, match=rf"{path}: has 3 bytes; 7 were .* --step 20"):
        start(tmp_path)


def test_a_changed_config_is_refused_with_what_changed(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(ConfigError, match=r"verifier\.num_slots = 3, was None\. .*ALLOW_CHANGES=1"):
        start(tmp_path, "verifier.num_slots=3")


def test_a_changed_config_is_gone_on_with_if_allowed(tmp_path: Path) -> None:
    run = begun(tmp_path)
    _, said = start(tmp_path, "verifier.num_slots=3", allow=True)
    assert "goes on with a changed config: verifier.num_slots = 3, was None" in said
    assert load(run.config).verifier.num_slots == 3


def test_another_training_is_refused_whatever_is_allowed(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(CheckpointError, match=r"another training: sft\.optimizer\.lr = 1\.0"):
        start(tmp_path, "sft.optimizer.lr=1.0", allow=True)


def test_a_run_that_another_job_has_is_refused_by_its_number(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(Refused, match="belongs to job 7, which is RUNNING; `scancel 7`"):
        start(tmp_path, job=job_of(id=8), owner="RUNNING")


@pytest.mark.parametrize("state", ["", "FAILED", "TIMEOUT"])
def test_a_run_whose_job_has_ended_is_taken_over(tmp_path: Path, state: str) -> None:
    run = begun(tmp_path)
    start(tmp_path, job=job_of(id=8), owner=state)
    assert owner_path(run).read_text() == "8\n"


def test_a_process_that_still_holds_the_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_magistral.run_folder.LOCK_TIMEOUT_S", 0.0)
    run = begun(tmp_path)
    with run.lock("trainer"), pytest.raises(RunBusy, match=r"trainer\.lock: is held by another"):
        start(tmp_path)


def test_what_a_selection_has_measured_is_safe_and_is_said(tmp_path: Path) -> None:
    run = begun(tmp_path)
    config = load(MICRO, ["sft.candidate_every_steps=20"])
    run.mark_finished(Stage.SFT)
    for step in (20, 40, 60):
        run.sft_candidate(step).mkdir(parents=True)
    assert what_is_safe(config, run) == Safe(2, 0)
    run.eval_candidate(20).parent.mkdir()
    run.eval_candidate(20).touch()
    assert what_is_safe(config, run) == Safe(2, 1)
    _, said = start(tmp_path, "sft.candidate_every_steps=20", allow=True)
    assert "selection goes on: 1 of 3 candidates are measured" in said


def test_a_config_whose_model_has_moved_since_is_compared_all_the_same(tmp_path: Path) -> None:
    run = begun(tmp_path)
    text = run.config.read_text().replace("path: null", "path: /gone/model", 1)
    assert "/gone/model" in text
    text = text[: text.index("  shape:")] + "  shape: null\n" + text[text.index("  dtype:") :]
    run.config.write_text(text)
    with pytest.raises(ConfigError, match=r"config has changed .* model\.path = None, was '/gone"):
        start(tmp_path)


def test_what_is_safe_grows_with_checkpoints_and_stages(tmp_path: Path) -> None:
    run, config = begun(tmp_path), load(MICRO)
    saved = what_is_safe(config, run)
    run.mark_finished(Stage.SFT)
    assert saved == Safe(1, 40)
    assert saved < what_is_safe(config, run) == Safe(2, 0)
