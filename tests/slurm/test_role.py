"""What each task of a step starts: hosts of other nodes, not loopback, and the GPUs of the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from megatron_magistral.cluster import Role
from megatron_magistral.rollout import sglang_server
from megatron_magistral.run_folder import RunFolder, Stage
from megatron_magistral.slurm.address_book import AddressBook, AddressTimeout
from megatron_magistral.slurm.cli import keep
from megatron_magistral.slurm.plan import RoleName
from megatron_magistral.slurm.role import Context, task_role
from tests.slurm.jobs import planned_run

HOST = "127.0.0.2"  # an address of this machine that no default has


def context_of(folder: Path, stage: Stage = Stage.RL) -> Context:
    run, plan, config = planned_run(folder)
    book = AddressBook(run, plan, stage)
    return Context(config, run, plan, book, stage, HOST, timeout_s=0.0, environment={"HOME": "/h"})


def option(role: Role, name: str) -> str:
    return role.command[role.command.index(name) + 1]


def test_services_publish_where_they_listen(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    for name in (RoleName.GENERATOR, RoleName.VERIFIER):
        role = task_role(name, 0, context)
        (url,) = context.book.wait(name, 1, timeout_s=0.0)
        assert url == f"http://{option(role, '--host')}:{option(role, '--port')}"
        assert option(role, "--host") == HOST


def test_the_controller_is_told_every_generator_and_verifier(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    with pytest.raises(AddressTimeout, match="generator 0 on n1"):
        task_role(RoleName.CONTROLLER, 0, context)
    task_role(RoleName.GENERATOR, 0, context)
    for index in (0, 1):
        task_role(RoleName.VERIFIER, index, context)
    role = task_role(RoleName.CONTROLLER, 0, context)
    assert option(role, "--host") == HOST
    assert option(role, "--generators").count(HOST) == 1
    assert option(role, "--verifiers").count(HOST) == 2


def test_trainer_ranks_get_torchruns_variables_and_all_addresses(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    context.book.publish(RoleName.GENERATOR, 0, "http://g:1")
    context.book.publish(RoleName.CONTROLLER, 0, "http://c:1")
    first, second = (task_role(RoleName.TRAINER, rank, context) for rank in (0, 1))
    assert (option(second, "--controller"), option(second, "--generators")) == (
        "http://c:1",
        "http://g:1",
    )
    expected = {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    expected |= {"MASTER_ADDR": HOST, "MASTER_PORT": first.environment["MASTER_PORT"], "HOME": "/h"}
    assert expected.items() <= second.environment.items()


def test_where_there_are_gpus_a_generator_begins_at_its_own(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    on_gpus = replace(context, plan=msgspec.structs.replace(context.plan, gpus_per_node=2))
    role = task_role(RoleName.GENERATOR, 0, on_gpus)
    assert (option(role, "--base-gpu-id"), option(role, "--device")) == ("0", "cuda")


def test_a_job_that_asked_for_no_gpus_uses_none_where_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_server, "detect_device", lambda: sglang_server.Device.CUDA)
    role = task_role(RoleName.GENERATOR, 0, context_of(tmp_path))
    assert "--base-gpu-id" not in role.command
    assert option(role, "--device") == "cpu"


def test_each_task_has_a_log_with_its_node_in_the_name(tmp_path: Path) -> None:
    role = task_role(RoleName.VERIFIER, 1, context_of(tmp_path))
    assert role.log.name == "verifier-1.n1.log"


def test_only_services_are_started_again(tmp_path: Path) -> None:
    context = context_of(tmp_path, Stage.SFT)
    assert task_role(RoleName.GENERATOR, 0, context).restarts.max_restarts > 0
    assert task_role(RoleName.VERIFIER, 0, context).restarts.max_restarts > 0
    assert task_role(RoleName.TRAINER, 0, context).restarts.max_restarts == 0


# --- keeping a process alive ------------------------------------------------------------------


def script(folder: Path, text: str, **changes: object) -> Role:
    return Role("generator 0 on n1", ("sh", "-c", text), folder / "role.log", {}, **changes)


@pytest.mark.parametrize("code", [0, 3, 75])
def test_a_role_ends_as_its_process_does(tmp_path: Path, code: int) -> None:
    assert keep(script(tmp_path, f"exit {code}"), RunFolder(tmp_path), serves=None) == code


def test_a_role_that_a_signal_ended_has_the_exit_code_of_a_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    role = script(tmp_path, "echo last words; kill -9 $$")
    assert keep(role, RunFolder(tmp_path), serves=None) == 137
    said = capsys.readouterr().err
    assert "generator 0 on n1 was killed by SIGKILL" in said
    assert "last words" in said


def test_a_service_never_ends_well_by_itself(tmp_path: Path) -> None:
    assert keep(script(tmp_path, "exit 0"), RunFolder(tmp_path), serves=Stage.RL) == 1


def test_a_service_is_ended_with_its_stage(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.mark_finished(Stage.RL)
    assert keep(script(tmp_path, "exec sleep 600"), run, serves=Stage.RL) == 0
