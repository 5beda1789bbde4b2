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


def test_a_model_that_does_not_fit_is_an_exit_code_and_the_reason():
    result = plan(CONFIG, *QUICK, "--model", "dense-120b", "--gpu", "a100")
    assert result.exit_code == BAD_INPUT
    assert "does not fit: " in " ".join(result.stdout.split())


def test_sizes_that_are_no_multiples_of_a_group_can_be_planned():
    sizes = ("rl.group_size=4", "rl.n_batch=12", "rl.n_minibatch=12", "rl.n_async=10")
    result = plan(CONFIG, *sizes, "rl.queue_size=2", "parallel.data=1", *MODEL)
    assert "running at once" in result.output, result.exception


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--generator-speed", "fast"), "CONCURRENCY:TOKENS_PER_S"),
        (("--lengths", "flat:3"), "lognormal:4000,1"),
        (("--assume", "luck=1"), "train_mfu"),
        (("--stage", "3"), "stages 0 to 0"),
        (("--gpus", "12"), "whole nodes of 8"),
        (("--gpus", "0"), "than or equal to 2"),
        (("--gpus", "2"), "cannot be divided"),
        (("--lengths", "lognormal:4000,1000"), "SIGMA at most 5"),
        (("--from-run", "/nowhere"), "has no samples.jsonl"),
        (("--assume", "train_mfu=nan"), "train_mfu=nan: must be at least 0"),
        (("--assume", "generator_share=2"), "is a share"),
        (("--generator-speed", "inf:5"), "both must be more than 0"),
        (("--train-tokens-per-s", "0"), "must be more than 0"),
        (("--prompt-tokens", "-5"), "--prompt-tokens -5: must be at least 0"),
        (("--drop-share", "nan"), "or equal to 0.99"),
        (("--update-s", "inf"), "--update-s inf: must be at least 0"),
        (("--pause-s", "1"), "is a part of --update-s"),
        (("--pause-s", "3", "--update-s", "2"), "is a part of --update-s"),
        (("--json", "/nowhere/plan.json"), "no file can be made there"),
        (("rl=null",), "rl"),
    ],
)
def test_bad_options_are_one_clear_error(arguments, words):
    result = plan(CONFIG, *MODEL, *arguments)
    assert result.exit_code == BAD_INPUT
    assert words in " ".join(result.stderr.split())
