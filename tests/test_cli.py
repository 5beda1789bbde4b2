"""The command line: what it prints, what it starts, and how it ends."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

from megatron_magistral.cli import app
from megatron_magistral.cluster import Role, RoleFailed
from megatron_magistral.config_file import load
from megatron_magistral.signals import STOPPED
from tests.cli_runs import MICRO, ROOT, CliRun

TINY = ROOT / "configs" / "tiny.yaml"


def magistral(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def planned(output: str) -> list[tuple[str, str, str]]:
    """(stage, process, command) of every line of a dry run."""
    found, stage = [], ""
    for line in output.splitlines():
        if line.startswith("#   "):
            name, _, command = line.removeprefix("#   ").partition(": ")
            found.append((stage, name, command))
        elif line.startswith("# "):
            stage = line.removeprefix("# ").partition(":")[0]
    return found


def test_a_dry_run_prints_the_resolved_config_as_a_config_file(tmp_path):
    result = magistral("train", str(TINY), "rl.num_steps=7", "--dry-run")
    assert result.exit_code == 0
    saved = tmp_path / "resolved.yaml"
    saved.write_text(result.stdout)
    assert load(saved) == load(TINY, ["rl.num_steps=7"])


def test_a_dry_run_names_every_process_of_every_stage_in_order():
    result = magistral("train", str(TINY), "--dry-run", "generator.num_replicas=2")
    assert [(stage, name) for stage, name, _ in planned(result.stdout)] == [
        ("prepare", "prepare"),
        ("sft", "trainer-0"),
        ("sft", "trainer-1"),
        ("rl", "generator-0"),
        ("rl", "generator-1"),
        ("rl", "verifier"),
        ("rl", "controller"),
        ("rl", "trainer-0"),
        ("rl", "trainer-1"),
    ]


def test_the_commands_of_a_dry_run_are_whole_lines_that_a_shell_takes(tmp_path):
    deep = tmp_path / ("a path with spaces " * 8 + "in it")
    result = magistral("train", str(TINY), "--dry-run", f"run.directory={deep}")
    for _, name, command in planned(result.stdout):
        words = shlex.split(command)
        assert sys.executable in words, name
        assert any(word.startswith(f"{deep}/tiny-") for word in words), name


def test_ranks_of_a_dry_run_differ_in_their_environment():
    result = magistral("sft", str(TINY), "--dry-run")
    commands = {name: shlex.split(command) for _, name, command in planned(result.stdout)}
    for rank in (0, 1):
        assert {f"RANK={rank}", "WORLD_SIZE=2"} <= set(commands[f"trainer-{rank}"])


def test_a_dry_run_starts_nothing_and_leaves_nothing(tmp_path):
    before = set(psutil.Process().children(recursive=True))
    magistral("train", str(TINY), "--dry-run", f"run.directory={tmp_path}/runs")
    assert set(psutil.Process().children(recursive=True)) <= before
    assert list(tmp_path.iterdir()) == []


def test_what_is_unusual_is_a_warning_beside_the_output():
    result = magistral("train", str(TINY), "--dry-run", "rl.n_async=1024")
    assert "warning: rl.n_async / rl.n_batch = 8.00" in result.stderr
    assert "warning" not in result.stdout


def test_sft_alone_plans_no_rl():
    result = magistral("sft", str(TINY), "--dry-run")
    assert {stage for stage, _, _ in planned(result.stdout)} == {"prepare", "sft"}
    assert yaml.safe_load(result.stdout)["rl"] is None


def test_sft_of_a_config_without_it_is_refused():
    result = magistral("sft", str(TINY), "sft=null", "--dry-run")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"{TINY}: has no sft section\n"


def test_the_doctor_prints_a_row_for_each_check_and_says_by_its_exit_code_if_all_is_well(
    monkeypatch, tmp_path
):
    well = magistral("doctor")
    monkeypatch.setenv("PATH", str(tmp_path))
    ill = magistral("doctor")
    assert (well.exit_code, ill.exit_code) == (0, 1)
    for check in ("Megatron-core", "SGLang", "seccomp", "Landlock", "free memory", "SLURM"):
        assert check in well.stdout
    assert "apt install g++" in " ".join(ill.stdout.split())


def test_a_benchmark_gets_its_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)  # the command replaces it
    result = magistral("bench", "collate", "--num-sequences", "8", "--num-seeds", "1")
    assert result.exit_code == 0
    assert "8 sequences per rank" in result.stdout


@pytest.mark.parametrize("name", ["collate", "maths", "sandbox"])
def test_every_benchmark_says_what_it_does(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)  # the command replaces it
    result = magistral("bench", name, "--help")
    assert result.exit_code == 0
    assert f"bench {name}" in result.stdout


def commands(command, *path: str):
    """Every command below this one, with its words."""
    yield " ".join(path), command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, *path, name)


def test_every_command_and_option_says_what_it_is_and_no_word_is_lost_in_the_help():
    for words, command in commands(get_command(app), "magistral"):
        texts = {words: command.help}
        texts |= {f"{words} {item.name}": getattr(item, "help", "") for item in command.params}
        for name, text in texts.items():
            assert text, name
            assert Text.from_markup(text).plain == text, name  # rich takes [this] for a style


@pytest.mark.parametrize(
    "option", [("--model", "dense-120b"), ("--gpu", "h200"), ("--lengths", "constant:9")]
)
def test_options_of_a_plan_for_nodes_are_refused_without_nodes(option):
    result = magistral("train", str(TINY), "--dry-run", *option)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"{option[0]}: goes with --nodes\n"


@pytest.mark.parametrize("arguments", [[], ["nothing"]])
def test_an_unknown_benchmark_is_answered_with_the_known_ones(arguments):
    result = magistral("bench", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is no benchmark; known: broadcast, collate, " in result.stderr


def test_a_real_process_prints_the_same_plan_wherever_it_is_started(tmp_path):
    result = subprocess.run(
        [Path(sys.executable).parent / "magistral", "train", str(TINY), "--dry-run"],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    in_process = planned(magistral("train", str(TINY), "--dry-run").stdout)
    assert [line[:2] for line in planned(result.stdout)] == [line[:2] for line in in_process]


def test_a_run_whose_trainers_stopped_as_asked_has_not_failed(monkeypatch, tmp_path):
    def stopped(config, console):
        trainer = Role("trainer-1", ("true",), tmp_path / "trainer-1.log")
        raise RoleFailed(trainer, "ended with exit code 75", 0, STOPPED)

    monkeypatch.setattr("megatron_magistral.cli.train", stopped)
    result = magistral("train", str(TINY))
    assert (result.exit_code, result.stdout) == (STOPPED, "")
    assert result.stderr == "stopped as asked: `magistral resume` goes on from what is saved\n"


@pytest.mark.distributed
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_sft_ends_every_process(tmp_path, number, code):
    with CliRun(tmp_path, "sft", str(MICRO), "sft.num_steps=100000") as run:
        run.wait_until(lambda: "sft 2/100000" in run.output)
        assert len(run.pids("trainer")) == 2
        run.process.send_signal(number)
        assert run.wait() == code
        assert run.left_running() == []
        assert run.output.endswith(f"{number.name}: every process was ended\n")
        assert "Traceback" not in run.output
