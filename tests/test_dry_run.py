"""`train --dry-run --nodes N`: placement, memory, tokens, time, and an exit code that tells."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megatron_magistral.cli import app
from megatron_magistral.config_file import parse

CONFIGS = Path(__file__).parents[1] / "configs"
BAD_INPUT = 2


def dry_run(config: str, *arguments: str):
    return CliRunner().invoke(
        app, ["train", str(CONFIGS / config), "--dry-run", *arguments], env={"COLUMNS": "80"}
    )


@pytest.fixture(scope="module")
def small():
    return dry_run("small_rl.yaml", "--nodes", "16", "--model", "magistral-small-24b")


def test_it_says_where_every_role_goes(small):
    assert small.exit_code == 0, small.output
    assert "# nodes: 16 of 8 h100 GPUs, 128 in use" in small.stdout
    assert "node 0: controller, verifier, trainer ranks 0-7" in small.stdout
    assert "nodes 1-7: verifier, trainer ranks 8-63" in small.stdout
    assert "nodes 8-15: verifier, generators 0-15 (4 GPUs each)" in small.stdout


def test_it_says_what_a_gpu_holds_and_how_long_a_step_takes(small):
    for word in ("weights", "gradients", "optimizer", "activations", "cache of", "tokens a step"):
        assert word in small.stdout
    assert "s expected" in small.stdout


def test_its_output_is_a_config_file_within_80_columns(small):
    assert max(map(len, small.stdout.splitlines())) <= 80
    parse(yaml.safe_load(small.stdout), check_files=False)


def test_files_that_are_elsewhere_are_a_warning(small):
    assert "data.train" in small.stderr and "not on this machine" in small.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nodes", "12"), ["nodes = 12", "need 16 nodes"]),
        (("parallel.data=7", "--nodes", "15"), ["n_minibatch = 2048", "parallel.data = 7"]),
        (("parallel.recompute=false", "--nodes", "16"), ["parallel.recompute", "GiB"]),
        (("parallel.tensor=3", "--nodes", "16"), ["tp = 3 must divide"]),
        (
            ("rl.kv_budget_tokens=9000000", "--nodes", "16"),
            ["rl.kv_budget_tokens = 9000000", "KV cache is expected to hold"],
        ),
        (
            ("generator.tensor_parallel=2", "--nodes", "12", "--model", "dense-120b"),
            ["generator.tensor_parallel", "GiB for weights"],
        ),
        (("--nodes", "16", "--gpu", "v100"), ["--gpu v100", "h100"]),
    ],
)
def test_what_is_wrong_is_said_and_told_by_the_exit_code(arguments, words):
    result = dry_run("small_rl.yaml", "--model", "magistral-small-24b", *arguments)
    assert result.exit_code == BAD_INPUT
    message = " ".join(result.stderr.split())
    assert all(word in message for word in words), message


def test_a_model_that_is_elsewhere_needs_a_shape():
    result = dry_run("small_rl.yaml", "--nodes", "16")
    assert result.exit_code == BAD_INPUT
    assert "--model NAME" in result.stderr


def test_every_stage_of_a_curriculum_is_forecast():
    # Batches of a sixteenth, so that the test is quick; the stages are what is asked for.
    result = dry_run(
        "medium.yaml", "--nodes", "64", "--model", "dense-120b", "--gpu", "h200", "rl.n_async=512",
        "rl.n_batch=512", "rl.n_minibatch=512",
    )  # fmt: skip
    assert "rl stage 0" in result.stdout, result.output
    assert "rl stage 2" in result.stdout


@pytest.fixture(scope="module")
def sft():
    return dry_run("small_sft.yaml", "--nodes", "8", "--model", "magistral-small-24b")


def test_an_sft_run_has_tokens_time_and_memory_too(sft):
    assert sft.exit_code == 0, sft.output
    assert "# sft: 256 sequences a step" in sft.stdout
    assert "# tokens a step: 2," in sft.stdout.replace("#   ", "# ")
    assert "s expected; a trainer's GPU needs" in sft.stdout


def test_generators_that_come_after_the_trainers_leave_no_gpu_idle(sft):
    assert "# nodes: 8 of 8 h100 GPUs, 64 in use" in sft.stdout
    assert "idle" not in sft.stdout + sft.stderr


def test_generators_that_cannot_measure_the_weights_of_sft_are_a_problem():
    result = dry_run(
        *("small_sft.yaml", "--nodes", "8", "--model", "dense-120b"),
        *("generator.num_replicas=32", "generator.tensor_parallel=2"),
    )
    assert result.exit_code == BAD_INPUT
    assert "selection: a generator's cache holds" in result.stderr


def test_nodes_without_dry_run_are_refused():
    result = CliRunner().invoke(app, ["train", str(CONFIGS / "tiny.yaml"), "--nodes", "2"])
    assert result.exit_code == BAD_INPUT
    assert "--dry-run" in result.stderr
