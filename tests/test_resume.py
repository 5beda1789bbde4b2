"""A run that is killed in each stage, and resumed, ends as if nothing had happened.

The whole of it, with real servers, takes two minutes: `pytest -m slow tests/test_resume.py`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from megatron_magistral.audit_run import audit_run
from megatron_magistral.cli import app
from megatron_magistral.config_file import dump, load
from megatron_magistral.launcher import extend
from megatron_magistral.rollout.audit import Fate
from megatron_magistral.rollout.journal import Journal
from megatron_magistral.run_folder import RunFolder, Stage
from megatron_magistral.trainer.checkpoint_files import CheckpointFolder, SavedState
from megatron_magistral.trainer.fingerprint import training_values
from megatron_magistral.types import Progress
from tests.cli_runs import MICRO, CliRun

SFT_STEPS, RL_STEPS = 120, 6
OVERRIDES = (
    f"sft.num_steps={SFT_STEPS}",
    f"rl.num_steps={RL_STEPS}",
    "checkpoint.sft_every_steps=20",
    "checkpoint.rl_every_steps=1",
    "evaluation.num_problems=4",
)


@dataclass(frozen=True)
class Resumed:
    """A run killed in its SFT stage and in its RL stage, and what it was before each resume."""

    run: RunFolder
    sft_start: int
    rl_start: int
    sft_rows: list[dict]
    eval_before_rl: bytes
    output: str

    def rows(self, stage: str) -> list[dict]:
        return [row for row in rows(self.run) if row["stage"] == stage]


def rows(run: RunFolder) -> list[dict]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def start_of(output: str, stage: str) -> int:
    match = re.search(rf"^{stage} goes on after step (\d+)$", output, re.MULTILINE)
    assert match, output
    return int(match[1])


def has_saved(cli: CliRun, stage: Stage) -> bool:
    folders = [CheckpointFolder(RunFolder(path).checkpoints(stage)) for path in cli.runs.glob("*")]
    return any(folder.latest() is not None for folder in folders)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    folder = tmp_path_factory.mktemp("resumed")
    with CliRun(folder, "train", str(MICRO), *OVERRIDES) as cli:
        cli.wait_until(lambda: has_saved(cli, Stage.SFT))
        run = RunFolder(cli.folder)
        cli.kill()
    with CliRun(folder, "resume", str(run.root)) as cli:
        cli.wait_until(lambda: has_saved(cli, Stage.RL))
        sft_start = start_of(cli.output, "sft")
        sft_rows = [row for row in rows(run) if row["stage"] == "sft"]
        before = run.eval_before_rl.read_bytes()
        cli.kill()
    with CliRun(folder, "resume", str(run.root)) as cli:
        assert cli.wait() == 0, cli.output
        assert cli.left_running() == []
        rl_start = start_of(cli.output, "rl")
        return Resumed(run, sft_start, rl_start, sft_rows, before, cli.output)


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.distributed
def test_the_stages_go_on_from_their_checkpoints(resumed: Resumed) -> None:
    assert 0 < resumed.sft_start < SFT_STEPS
    assert 0 < resumed.rl_start < RL_STEPS


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.distributed
def test_every_step_of_both_stages_is_recorded_once(resumed: Resumed) -> None:
    assert [row["step"] for row in resumed.rows("sft")] == list(range(SFT_STEPS))
    assert [row["step"] for row in resumed.rows("rl")] == list(range(RL_STEPS))
    for stage in ("sft", "rl"):
        board = EventAccumulator(str(resumed.run.root / "tensorboard" / stage))
        board.Reload()
        shown = [event.step for event in board.Scalars(f"{stage}/loss")]
        assert shown == [row["step"] for row in resumed.rows(stage)]


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.distributed
def test_a_stage_that_has_ended_is_not_repeated(resumed: Resumed) -> None:
    assert resumed.rows("sft") == resumed.sft_rows
    assert resumed.eval_before_rl == resumed.run.eval_before_rl.read_bytes()


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.distributed
def test_every_prompt_group_is_trained_once_whatever_was_killed(resumed: Resumed) -> None:
    report = audit_run(resumed.run)
    assert report.findings == ()
    assert (report.num_steps, report.num_begun) == (RL_STEPS, 2)
    config = load(resumed.run.config)
    assert report.count(Fate.TRAINED) == RL_STEPS * config.rl.groups_per_batch
    samples = [json.loads(line) for line in resumed.run.samples.read_text().splitlines()]
    assert {sample["step"] for sample in samples} == set(range(RL_STEPS))


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.distributed
def test_no_token_is_older_or_newer_than_can_be(resumed: Resumed) -> None:
    rows = [row for row in audit_run(resumed.run).rows if row.step is not None]
    assert all(row.version <= row.oldest <= row.newest <= row.step for row in rows)


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.distributed
def test_a_run_that_has_ended_shows_its_results_and_starts_nothing(resumed: Resumed) -> None:
    again = CliRunner().invoke(app, ["resume", str(resumed.run.root)])
    assert again.exit_code == 0, again.output
    assert "Held-out problems, pass@1 over" in again.stdout
    assert [row["step"] for row in resumed.rows("rl")] == list(range(RL_STEPS))


# --- what cannot be resumed -------------------------------------------------------------------


def interrupted(folder: Path) -> RunFolder:
    """A run of which only the prepared data and two SFT checkpoints are there, without tensors."""
    run = RunFolder(folder)
    config = load(MICRO)
    run.config.write_text(dump(config))
    run.mark_finished(Stage.PREPARE)
    checkpoints = CheckpointFolder(run.checkpoints(Stage.SFT))
    for step in (20, 40):
        (checkpoints.begin(step) / "__0_0.distcp").write_bytes(b"tensors")
        state = SavedState(Progress(step), {}, training_values(config, "sft"))
        checkpoints.commit(step, state, {})
    return run


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["resume", *arguments])
    assert result.exit_code == 2, result.output
    return result.stderr.strip()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    assert refusal(str(tmp_path)) == f"{tmp_path}: is no run folder: it has no config.yaml"


def test_a_run_that_is_going_on_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_magistral.run_folder.LOCK_TIMEOUT_S", 0.0)
    run = interrupted(tmp_path)
    with run.lock("trainer"):
        assert "trainer.lock: is held by another process" in refusal(str(tmp_path))


def test_a_damaged_checkpoint_is_refused_with_the_step_to_go_back_to(tmp_path: Path) -> None:
    run = interrupted(tmp_path)
    path = CheckpointFolder(run.checkpoints(Stage.SFT)).path(40) / "__0_0.distcp"
    path.write_bytes(b"tensorz")
    message = refusal(str(tmp_path))
    assert message.startswith(f"{path}: does not hold what was written")
    assert "`magistral resume RUN --step 20` goes on from step 20" in message


def test_another_training_is_refused_with_the_keys(tmp_path: Path) -> None:
    interrupted(tmp_path)
    message = refusal(str(tmp_path), "sft.optimizer.lr=1.0")
    assert "is of another training: sft.optimizer.lr = 1.0, was 0.01" in message


def test_groups_of_another_training_are_refused_where_there_is_no_checkpoint_yet(
    tmp_path: Path,
) -> None:
    run = interrupted(tmp_path)
    run.mark_finished(Stage.SFT)
    with Journal(run.journal):
        pass
    before = load(run.config).rl
    assert before is not None
    size = before.group_size
    message = refusal(str(tmp_path), f"rl.group_size={size // 2}")
    assert message.startswith(f"{run.journal}: holds groups of another training: ")
    assert f"rl.group_size = {size // 2}, was {size}" in message


def test_fewer_steps_than_are_trained_already_are_refused(tmp_path: Path) -> None:
    run = interrupted(tmp_path)
    run.mark_finished(Stage.SFT)
    checkpoints = CheckpointFolder(run.checkpoints(Stage.RL))
    for step in (1, 3):
        checkpoints.begin(step)
        state = SavedState(Progress(step), {}, training_values(load(run.config), "rl"))
        checkpoints.commit(step, state, {})
    message = refusal(str(tmp_path), "rl.num_steps=2")
    assert message.startswith("rl.num_steps = 2: must be at least the 3 steps that are trained")
    assert "`magistral resume RUN --step 1`" in message


def test_the_last_stage_can_be_extended_and_no_other(tmp_path: Path) -> None:
    run = interrupted(tmp_path)
    for stage in (Stage.SFT, Stage.RL):
        run.mark_finished(stage)
    for override, done in (("sft.num_steps=80", 60), ("rl.num_steps=2", 3)):
        key, _, value = override.partition("=")
        message = refusal(str(tmp_path), override)
        assert message.startswith(f"{key} = {value}: the stage has ended after {done} steps; ")
    extend(load(run.config, ["rl.num_steps=9"]), run)
    finished = {stage for stage in Stage if run.is_finished(stage)}
    assert finished == {Stage.PREPARE, Stage.SFT}


def test_a_step_without_a_checkpoint_is_refused_with_those_there_are(tmp_path: Path) -> None:
    interrupted(tmp_path)
    message = refusal(str(tmp_path), "--step", "30")
    assert message.endswith("has no checkpoint of step 30; there are those of steps 20, 40")
