"""The preflight as a job runs it: `slurm node` on each of two nodes, then `slurm compare` on one.

The nodes are this machine under two names; nvidia-smi is a script that says what a node has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_magistral.config_file import dump, load
from megatron_magistral.data.tokenizer import build_tokenizer
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.slurm.cli import app
from tests.slurm.jobs import MICRO, planned_run
from tests.test_bad_input import model as made_model

NODES = ("n0", "n1")
GOOD = "0, NVIDIA H100 80GB HBM3, 550.90.07, 4\n1, NVIDIA H100 80GB HBM3, 550.90.07, 4\n"


class Nodes:
    """Two nodes with two GPUs each, of one job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.run, _, _ = planned_run(folder / "run", gpus_per_node=2)
        self._gpus = dict.fromkeys(NODES, GOOD)

    def has(self, node: str, gpus: str) -> None:
        """What nvidia-smi prints there."""
        self._gpus[node] = gpus

    def call(self, node: str, command: str) -> tuple[int, str]:
        """The exit code of a command of the preflight on `node`, and what the job's log gets."""
        tools = self._folder / node
        tools.mkdir(exist_ok=True)
        tool = tools / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{self._gpus[node]}END\n")
        tool.chmod(0o755)
        done = subprocess.run(
            (sys.executable, "-m", "megatron_magistral.slurm", command, "--run", self.run.root),
            env=dict(os.environ)
            | {
                "PATH": f"{tools}:{os.environ['PATH']}",
                "SLURMD_NODENAME": node,
                "SLURM_JOB_ID": "7",
                "MAGISTRAL_NODES": ",".join(NODES),
                "MAGISTRAL_PLACES_PER_NODE": "2",
                "MAGISTRAL_GPUS_PER_NODE": "2",
                "MAGISTRAL_TIME_LEFT": "1:00:00",
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_nodes_that_are_alike_pass(nodes: Nodes) -> None:
    assert [nodes.call(node, "node") for node in NODES] == [(0, "")] * 2
    assert nodes.call("n0", "compare") == (0, "preflight: 2 nodes are as they must be\n")


def test_a_node_that_lacks_a_gpu_ends_the_job_with_its_name(nodes: Nodes) -> None:
    nodes.has("n1", GOOD.splitlines(keepends=True)[0])
    assert nodes.call("n0", "node") == (0, "")
    code, said = nodes.call("n1", "node")
    assert code == 2
    assert said.startswith("n1: GPUs: the driver shows 1, the job has 2 on each node: drain this")
    assert said.count("\n") == 1


def test_a_node_with_another_driver_is_found_by_comparing(nodes: Nodes) -> None:
    nodes.has("n1", GOOD.replace("550.90.07", "535.54"))
    assert [nodes.call(node, "node")[0] for node in NODES] == [0, 0]
    code, said = nodes.call("n0", "compare")
    assert code == 2
    assert "n1: driver is '535.54'" in said or "n0: driver is '550.90.07'" in said


def test_a_model_that_is_missing_on_one_node_ends_the_job_with_its_name(
    nodes: Nodes, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    overrides = made_model(model, build_tokenizer(["one two three four"], 300))
    nodes.run.config.write_text(dump(load(MICRO, overrides)))
    assert nodes.call("n0", "node") == (0, "")
    model.rename(tmp_path / "elsewhere")
    code, said = nodes.call("n1", "node")
    assert code == 2
    assert said == f"n1: model.path = {model}: no Hugging Face model there (no config.json)\n"
    assert nodes.call("n0", "compare")[0] == 2


def test_a_model_that_lacks_a_file_on_one_node_is_found_by_comparing(
    nodes: Nodes, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    overrides = made_model(model, build_tokenizer(["one two three four"], 300))
    nodes.run.config.write_text(dump(load(MICRO, overrides)))
    assert nodes.call("n0", "node") == (0, "")
    (model / "tokenizer.json").unlink()
    assert nodes.call("n1", "node") == (0, "")
    code, said = nodes.call("n0", "compare")
    assert code == 2
    assert "model is" in said and "of 2 nodes" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("stages",), "stages: {run}/config.yaml: cannot be read: No such file or directory"),
        (("node",), "node: SLURMD_NODENAME is not set: srun sets it"),
        (("links",), "links: MAGISTRAL_PLACES_PER_NODE is not set: submit with --ntasks-per-node"),
        (("stage-done", "rl"), "stage_done: {run}/finished: is not there"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_where_there_is_no_job_a_command_says_what_is_missing(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURMD_NODENAME", "MAGISTRAL_PLACES_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "run"
    result = CliRunner().invoke(app, [*arguments, "--run", str(run)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == said.format(run=run) + "\n"


def test_a_run_folder_that_one_node_does_not_see_is_named(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run.root.rename(tmp_path / "local to n0")
    nodes.run = RunFolder(nodes.run.root)
    code, said = nodes.call("n1", "node")
    assert code == 2
    assert said == (
        f"n1: {nodes.run.root} is not there: the run folder must be on a shared filesystem\n"
    )
