"""`magistral plan CONFIG` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_magistral.cli import app

CONFIG = str(Path(__file__).parents[2] / "configs" / "small_rl.yaml")
QUICK = ("rl.n_batch=256", "rl.n_minibatch=256", "rl.n_async=512")
MODEL = ("--model", "magistral-small-24b")
BAD_INPUT = 2


def plan(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "80"})


def test_a_config_alone_is_enough_and_everything_fits_80_columns(tmp_path):
    document = tmp_path / "plan.json"
    result = plan(CONFIG, *QUICK, *MODEL, "--gpus", "64", "--json", str(document))
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    for word in ("synchronous", "generators idle", "token age", "cache used", "recommended:"):
        assert word in result.stdout
    written = json.loads(document.read_text())
    best = max(written["candidates"], key=lambda c: c["outlook"]["steps_per_h"])
    assert f"parallel.data={best['data']} " in result.stdout


def test_plan_run_and_plan_weights_are_commands_of_the_same_group():
    assert plan("run", CONFIG, *QUICK, *MODEL).stdout == plan(CONFIG, *QUICK, *MODEL).stdout
    assert plan("weights", "--gpus", "64").exit_code == 0


def test_a_run_tells_lengths_drops_and_speeds(tmp_path):
    row = {"stage": "rl", "step": 0, "completion_tokens_mean": 100.0, "groups_taken": 3.0}
    row |= {"groups_dropped": 1.0, "train_tokens_per_s": 12345.0, "update_total_s": 7.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    sample = {"step": 0, "spans": [[0, 0, 50]]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")

    result = plan(CONFIG, *QUICK, *MODEL, "--from-run", str(tmp_path))

    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "mean 100, " in text
    assert "12,345 tokens/s (measured)" in text
    assert "weight update: 7.50 s" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--generator-speed", "fast"), "CONCURRENCY:TOKENS_PER_S"),
        (("--lengths", "flat:3"), "lognormal:4000,1"),
        (("--assume", "luck=1"), "train_mfu"),
        (("--stage", "3"), "stages 0 to 0"),
        (("--gpus", "12"), "whole nodes of 8"),
        (("rl=null",), "rl"),
    ],
)
def test_bad_options_are_one_clear_error(arguments, words):
    result = plan(CONFIG, *MODEL, *arguments)
    assert result.exit_code == BAD_INPUT
    assert words in " ".join(result.stderr.split())
