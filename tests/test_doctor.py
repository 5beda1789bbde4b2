"""The doctor on the machine of the test, and on machines that a test can pretend."""

import socket

import pytest
from rich.console import Console

from megatron_magistral import doctor
from megatron_magistral.doctor import (
    Finding,
    Health,
    as_table,
    container_memory_mib,
    examine,
    failures,
)

ASKED_FOR = (
    "Python",
    "torch",
    "CUDA",
    "Megatron-core",
    "transformer_engine",
    "apex",
    "SGLang",
    "fastText lid.176",
    "g++",
    "seccomp",
    "Landlock",
    "free memory",
    "/dev/shm",
    "ports",
    "SLURM",
)


@pytest.fixture(scope="module")
def findings() -> list[Finding]:
    return examine()


def find(findings: list[Finding], name: str) -> Finding:
    return next(item for item in findings if item.name == name)


def test_every_part_of_the_machine_is_looked_at(findings):
    assert tuple(item.name for item in findings) == ASKED_FOR


def test_a_failure_always_says_what_to_do(findings, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "MEMORY_NEEDED_MIB", 1 << 40)
    monkeypatch.setattr(doctor, "SHARED_MEMORY_NEEDED_MIB", 1 << 40)
    found = failures(examine())
    assert {item.name for item in found} >= {"g++", "free memory", "/dev/shm"}
    assert all(item.remedy for item in found)


def test_the_table_shows_every_finding_whatever_is_in_it(findings):
    odd = Finding("odd", Health.FAIL, "[red]seen[/]", "[do] this")
    console = Console(width=200)
    with console.capture() as captured:
        console.print(as_table([*findings, odd]))
    text = captured.get()
    for item in [*findings, odd]:
        assert item.seen in text and item.remedy in text


def test_a_port_is_free_or_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert find(examine([port]), f"port {port}").health is Health.FAIL
    assert find(examine([port]), f"port {port}").health is Health.OK


def test_a_compiler_that_does_not_know_cpp20_is_too_old(tmp_path, monkeypatch):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find(examine(), "g++").remedy == "install g++ 10 or newer"


def test_a_predictor_without_its_model_is_a_failure(tmp_path, monkeypatch):
    def absent():
        raise FileNotFoundError("lid.176.ftz: not there")

    monkeypatch.setattr("megatron_magistral.rewards.language.shipped_model", absent)
    found = find(examine(), "fastText lid.176")
    assert (found.health, found.seen) == (Health.FAIL, "lid.176.ftz: not there")


def cgroup(tmp_path, limit: str):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{700 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {200 << 20}\nslab 2\n")
    return tmp_path


def test_the_limit_of_a_container_bounds_the_memory_and_its_file_cache_counts_as_free(tmp_path):
    assert container_memory_mib(cgroup(tmp_path, str(1000 << 20))) == 500


@pytest.mark.parametrize("limit", ["max", None])
def test_without_a_limit_a_container_bounds_nothing(tmp_path, limit):
    folder = cgroup(tmp_path, limit) if limit else tmp_path
    assert container_memory_mib(folder) == float("inf")
