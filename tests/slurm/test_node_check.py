"""Preflight: each node's problems in words, and the one node that differs from the others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_magistral.slurm import node_check
from megatron_magistral.slurm.links import clock_problems
from megatron_magistral.slurm.node_check import (
    NodeReport,
    check_node,
    compare,
    fingerprint,
    gpu_problems,
    read_reports,
    save_report,
)
from tests.slurm.jobs import planned_run


def gpu(index: int, used_mib: float = 3.0) -> dict[str, str]:
    return {"index": str(index), "memory.used": str(used_mib)}


def test_a_missing_gpu_is_seen() -> None:
    (problem,) = gpu_problems([gpu(i) for i in range(7)], 8)
    assert problem.startswith("GPUs: the driver shows 7, the job has 8 on each node")


def test_a_gpu_that_somebody_else_still_holds_is_named() -> None:
    (problem,) = gpu_problems([gpu(0), gpu(1, 70000.0)], 2)
    assert problem.startswith("GPU 1: 70000 MiB are in use before the job has started")


def test_the_node_that_differs_is_named_with_what_the_others_have() -> None:
    reports = [
        NodeReport(f"n{i}", (), {"driver": "535.1" if i == 2 else "550.9"}) for i in range(5)
    ]
    assert compare(reports, ["n0", "n1", "n2", "n3", "n4"]) == [
        "n2: driver is '535.1', but '550.9' on 4 of 5 nodes"
    ]


def test_a_node_that_said_nothing_is_named() -> None:
    assert compare([NodeReport("n0", (), {})], ["n0", "n1"]) == ["n1: its preflight left no report"]


def test_a_model_that_lacks_a_file_on_one_node_has_another_fingerprint(tmp_path: Path) -> None:
    for node in ("n0", "n1"):
        (tmp_path / node).mkdir()
        for name in ("config.json", "model-00001.safetensors", "model-00002.safetensors"):
            (tmp_path / node / name).write_text("{}")
    assert fingerprint(tmp_path / "n0") == fingerprint(tmp_path / "n1")
    (tmp_path / "n1" / "model-00002.safetensors").unlink()
    assert fingerprint(tmp_path / "n0") != fingerprint(tmp_path / "n1")


def test_a_model_that_is_missing_on_a_node_is_a_problem_of_that_node(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    run, plan, _ = planned_run(tmp_path / "run", "model.shape=null", f"model.path={model}")
    shutil.rmtree(model)
    report = check_node(run, plan, "n1")
    (problem,) = report.problems
    assert problem.startswith(f"model.path = {model}: no Hugging Face model there")


def test_a_node_without_a_driver_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    rows, problem = node_check._nvidia_smi()
    assert (rows, problem) == ([], "driver: no nvidia-smi on this node")


def test_a_driver_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Driver/library version mismatch'; exit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    rows, problem = node_check._nvidia_smi()
    assert rows == []
    assert problem == "driver: nvidia-smi ended with 18: Driver/library version mismatch"


def test_what_nvidia_smi_prints_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H100 80GB HBM3, 550.90.07, 4'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    ((row,), problem) = node_check._nvidia_smi()
    assert problem == ""
    assert (row["name"], row["driver_version"]) == ("NVIDIA H100 80GB HBM3", "550.90.07")
    assert gpu_problems([row], 1) == []


def test_a_full_disk_is_named_with_what_may_be_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan, _ = planned_run(tmp_path)
    monkeypatch.setattr(node_check, "RUN_FOLDER_NEEDED_GIB", 1e9)
    problems = check_node(run, plan, "n0").problems
    assert any(f"{tmp_path}: " in p and "the run folder may take" in p for p in problems)


def test_reports_are_read_as_they_were_saved(tmp_path: Path) -> None:
    run, plan, _ = planned_run(tmp_path)
    report = NodeReport("n0", ("a problem",), {"torch": "2.13.0"})
    save_report(report, run, plan.attempt)
    assert read_reports(run, plan.attempt) == [report]


def test_a_clock_that_is_off_is_named_with_how_much() -> None:
    (problem,) = clock_problems({"n0": 1000.0, "n1": 1000.01, "n2": 1042.0})
    assert problem.startswith("n2: its clock is +42.0 s off the median of 3 nodes")
