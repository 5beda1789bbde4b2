"""A whole run with two stages: real engines, verifiers and trainers. A minute: slow."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_magistral.cli import app
from megatron_magistral.data.pass_rates import read_pass_rates
from megatron_magistral.data.schema import read_traces
from megatron_magistral.run_folder import RunFolder
from tests.cli_runs import MICRO, CliRun

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.distributed]

STAGES = (
    "rl.stages=[{begin: {max_steps: 2}, l_max: 160, n_batch: 8, n_minibatch: 8, n_async: 16, "
    "kv_budget_tokens: 1600, drop_solved_above: 0.5}]"
)
SIZES = (
    *("rl.num_steps=4", "rl.keep_samples=16", "rl.kv_budget_tokens=2000"),
    *("sft.num_steps=80", "evaluation.num_problems=4"),
)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_changes_its_stage_and_leaves_what_sft_starts_from(tmp_path: Path) -> None:
    with CliRun(tmp_path, "train", str(MICRO), STAGES, *SIZES) as cli:
        assert cli.wait() == 0, cli.output
        run = RunFolder(cli.folder)
        assert cli.left_running() == []
    (began,) = [line for line in lines(run.curriculum) if line["type"] == "stage"]
    assert (began["stage"], began["step"], began["rule"]) == (1, 2, "step")
    rows = [row for row in lines(run.metrics) if row["stage"] == "rl"]
    assert [row["stage_index"] for row in rows] == [0, 0, 1, 1]
    assert [row["kv_budget_tokens"] for row in rows] == [2000, 2000, 1600, 1600]
    assert all(1000 < row["kv_used_tokens_max"] <= row["kv_budget_tokens"] for row in rows[:2])
    assert rows[3]["kv_used_tokens_max"] <= 2000
    samples = lines(run.samples)
    assert [sum(row["step"] == step for row in samples) for step in range(4)] == [16, 16, 8, 8]
    assert "stage 1 begins with step 2, by the rule step" in run.log("controller").read_text()
    assert run.eval_after_rl.exists()
    assert set(began["left_out"]) <= read_pass_rates(run.pass_rates).keys()
    _traces_of(run, tmp_path)


def _traces_of(run: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "traces.jsonl"
    solved = [row for row in lines(run.samples) if row["solved"]]
    arguments = ["data", "traces", str(run.root), "--out", str(out), "--from-step", "0"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == (0 if solved else 2), result.output
    if solved:
        read = read_traces(out)
        assert read.bad == ()
        responses = {row["response"] for row in solved}
        assert {row.response for row in read.rows} <= responses
