"""`magistral plan weights` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_magistral.weights.plan_cli import app
from tests.trainer.models import hf_model


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["weights", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_table_and_the_file_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, output = run("--gpus", "64", "--json", str(path))
    assert code == 0
    document = json.loads(path.read_text())
    kinds = [(p["kind"], p["senders"]) for p in document["predictions"]]
    assert kinds == [("gather", "leaders"), ("direct", "leaders"), ("direct", "holders")]
    for prediction in document["predictions"]:
        assert f"{prediction['total_s']:.2f}" in output


def test_the_tables_fit_into_80_columns(tmp_path: Path) -> None:
    """Every number of the longest rows is there as a whole, and no line is longer."""
    path = tmp_path / "plan.json"
    arguments = ["--pp", "2", "--gpus", "4096", "--link", "nic_gb_s=0.1", "--json", str(path)]
    result = CliRunner().invoke(app, ["weights", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 0 and "…" not in result.output
    first_line, *lines = result.output.splitlines()
    assert "magistral-small-24b" in first_line and all(len(line) <= 80 for line in lines)
    for p in json.loads(path.read_text())["predictions"]:
        numbers = ("total_s", "pause_s", "first_bucket_s", "gather_s", "convert_s", "wire_s")
        shown = [f"{p[number]:.2f}" for number in numbers]
        rows = [line.split() for line in lines if line.split()[:1] == ["4096"]]
        assert all(any(value in row for row in rows) for value in shown), p


def test_a_link_that_is_named_counts(tmp_path: Path) -> None:
    paths = [tmp_path / "usual.json", tmp_path / "slow.json"]
    run("--gpus", "64", "--json", str(paths[0]))
    run("--gpus", "64", "--link", "nic_gb_s=4.5", "--json", str(paths[1]))
    usual, slow = (json.loads(path.read_text())["predictions"][0]["wire_s"] for path in paths)
    assert slow > 5 * usual


def test_a_config_with_experts_is_read(tmp_path: Path) -> None:
    hf_model("qwen3_moe").config.save_pretrained(tmp_path)
    config = str(tmp_path / "config.json")
    layout = ["--tp", "2", "--ep", "4", "--generator-tp", "2", "--generator-ep", "2"]
    code, output = run("--model", config, "--gpus", "16", *layout)
    assert code == 0, output


def test_a_layout_that_no_gpu_can_hold_is_named() -> None:
    """24e9 parameters of 18 bytes over 8 ranks; 2 bytes over 1."""
    code, output = run("--gpus", "16", "--generator-tp", "1", "--gpu-memory-gib", "40")
    assert code == 0
    assert "--gpus 16: a trainer's weights, gradients and optimizer are 49 GiB a GPU" in output
    assert "--gpus 16: a generator's weights are 44 GiB a GPU, more than 40" in output


def test_a_number_of_gpus_that_does_not_fit_is_named_and_the_others_are_shown() -> None:
    code, output = run("--gpus", "24", "--gpus", "64")
    assert code == 0
    assert "--gpus 24: 12 trainer GPUs must be a multiple of tp x pp = 8" in output
    assert "gather" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "gpt-5"), "model = 'gpt-5': must be one of magistral-small-24b"),
        (("--link", "nic=4"), "--link nic=4: must be NAME=VALUE, NAME one of gpus_per_node"),
        (("--link", "nic_gb_s=fast"), "--link nic_gb_s=fast: 'fast' is not a number"),
        (("--link", "nic_gb_s=0"), "--link nic_gb_s=0: must be more than 0"),
        (("--gpus", "24"), "--gpus 24: 12 trainer GPUs must be a multiple"),
    ],
)
def test_bad_input_is_refused_by_name(arguments: tuple[str, ...], words: str) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert words in " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--wire-bytes", "0"), "--wire-bytes"),
        (("--gpu-memory-gib", "-1"), "--gpu-memory-gib"),
        (("--trainer-share", "nan"), "--trainer-share nan: must be between 0 and 1"),
        (("--trainer-share", "1"), "--trainer-share 1.0: must be between 0 and 1"),
        (("--link", "nic_gb_s=nan"), "--link nic_gb_s=nan"),
        (("--link", "nic_gb_s=inf"), "--link nic_gb_s=inf"),
        (("--json", "/nope/x.json"), "--json /nope/x.json: no such directory"),
        (("--json", "/"), "--json /: a directory, must be a file"),
    ],
)
def test_bad_input_is_one_line_before_any_work(arguments: tuple[str, ...], why: str) -> None:
    code, output = run("--gpus", "64", *arguments)
    assert code == 2 and why in output and "Traceback" not in output
    assert "magistral-small-24b" not in output
