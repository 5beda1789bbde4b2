"""`magistral`: the command line.

Exit code 2 for what the user can put right, 1 for a failed run, 75 for one that was asked to stop
by its file `stop_requested`, 128 + n for a run that was ended by signal n.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import runpy
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

import benchmarks
from megatron_magistral.analysis.plan_cli import ConfigFirst, plan_run
from megatron_magistral.analysis.site_options import (
    GpuOption,
    GpusPerNodeOption,
    LengthsOption,
    ModelOption,
    SiteError,
    architecture_for,
    site_for,
)
from megatron_magistral.audit_run import audit_run_command
from megatron_magistral.cluster import Role, RoleFailed, StageTimeout
from megatron_magistral.config import Config
from megatron_magistral.config_file import ConfigError, dump, load
from megatron_magistral.data.cli import app as data_app
from megatron_magistral.doctor import as_table, examine, failures
from megatron_magistral.dry_run import dry_run as dry_run_on_nodes
from megatron_magistral.import_gguf import import_gguf_command
from megatron_magistral.launcher import open_run_folder, planned_roles, resume, train
from megatron_magistral.preflight import Refused, check_inputs, run_folder_pattern
from megatron_magistral.run_folder import RunBusy
from megatron_magistral.signals import SIGNAL_BASE, STOPPED, Stopped, stopped_by_signals
from megatron_magistral.slurm.cli import app as slurm_app
from megatron_magistral.trainer.checkpoint_files import CheckpointError
from megatron_magistral.weights.plan_cli import app as plan_app
from verifier_sandbox.cli import app as sandbox_app
from verifier_sandbox.mathcheck.audit import app as audit_app

BAD_INPUT = 2
FAILED = 1

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(sandbox_app, name="sandbox", help="The code judge: serve, run, selftest.")
app.add_typer(
    plan_app,
    name="plan",
    cls=ConfigFirst,
    help="Predict a run (plan CONFIG ...) or a weight update (plan weights) on GPUs.",
)
app.add_typer(data_app, name="data", help="Make data from what runs have left.")
app.add_typer(slurm_app, name="slurm", help="The parts of a SLURM job: launch/ calls them.")
app.add_typer(audit_app, name="audit", help="Audit a run's prompt groups, or the maths check.")

app.command("import-gguf")(import_gguf_command)
audit_app.command("run")(audit_run_command)
plan_app.command("run")(plan_run)

ConfigPath = Annotated[Path, typer.Argument(help="A file of configs/.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value ...")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print config and processes, start none.")]
BENCHMARKS = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__))


@app.callback()
def magistral() -> None:
    """Reinforcement learning from verifiable rewards."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")


@app.command("train")
def train_command(
    ctx: typer.Context,
    config_path: ConfigPath,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    nodes: Annotated[
        int | None, typer.Option(help="With --dry-run: what a job on so many nodes would be.")
    ] = None,
    gpus_per_node: GpusPerNodeOption = 8,
    model: ModelOption = None,
    gpu: GpuOption = "h100",
    lengths: LengthsOption = None,
) -> None:
    """Run every stage of a config: SFT where it has one, then RL.

    --model, --gpu, --gpus-per-node and --lengths go with --nodes.
    """
    if nodes is None:
        _refuse_given(ctx, ("model", "gpu", "gpus_per_node", "lengths"), "goes with --nodes")
        _start(_load(config_path, overrides), dry_run)
        return
    if not dry_run:
        _refuse("--nodes: goes with --dry-run; sbatch launch/*.sh starts a job on nodes")
    config = _load(config_path, overrides, check_files=False)
    _warn(config)
    try:
        site = site_for(config, gpu=gpu, gpus_per_node=gpus_per_node, lengths=lengths)
        planned = dry_run_on_nodes(config, architecture_for(config, model), site, nodes)
    except SiteError as error:
        _refuse(str(error))
    typer.echo(dump(config))
    for line in planned.lines:
        typer.echo(f"# {line}")
    for note in planned.notes:
        _say(f"warning: {note}", "yellow")
    if planned.problems:
        _refuse("\n".join(f"wrong: {problem}" for problem in planned.problems))


@app.command("sft")
def sft_command(
    config_path: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False
) -> None:
    """Run the SFT stage of a config alone."""
    config = _load(config_path, overrides)
    if config.sft is None:
        _refuse(f"{config_path}: has no sft section")
    _start(config.model_copy(update={"rl": None}), dry_run)


@app.command("resume")
def resume_command(
    run_path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    overrides: Overrides = None,
    step: Annotated[
        int | None,
        typer.Option(help="Go on from this checkpoint of the interrupted stage, not the latest."),
    ] = None,
) -> None:
    """Go on with an interrupted run where its latest checkpoint left off."""
    try:
        run = open_run_folder(run_path)
    except Refused as error:
        _refuse(str(error))
    config = _load(run.config, overrides)
    _warn(config)
    _attempt(lambda: resume(config, run, Console(), step=step))


@app.command()
def doctor() -> None:
    """Check this machine for every role; exit code 1 if something is missing."""
    findings = examine()
    Console().print(as_table(findings))
    raise typer.Exit(FAILED if failures(findings) else 0)


# Whatever follows the name, options too, belongs to the benchmark.
@app.command(context_settings={"allow_interspersed_args": False})
def bench(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(BENCHMARKS)}.")] = "",
    arguments: Annotated[
        list[str] | None, typer.Argument(help="For the benchmark; --help lists them.")
    ] = None,
) -> None:
    """Run one of the benchmarks."""
    if name not in BENCHMARKS:
        _refuse(f"bench: NAME = {name!r} is no benchmark; known: {', '.join(BENCHMARKS)}")
    # As `python -m benchmarks.NAME` does it, so that each reads its arguments in its own way.
    sys.argv = [f"magistral bench {name}", *(arguments or [])]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")


def _start(config: Config, dry_run: bool) -> None:
    _warn(config)
    _attempt(lambda: _print_plan(config) if dry_run else train(config, Console()))


def _warn(config: Config) -> None:
    for warning in config.warnings():
        _say(f"warning: {warning}", "yellow")


def _attempt(work: Callable[[], object]) -> None:
    """Do it; whatever ends it early becomes a message and an exit code."""
    try:
        with stopped_by_signals():
            work()
    except (Refused, ConfigError, CheckpointError, RunBusy) as error:
        _refuse(str(error))
    except (RoleFailed, StageTimeout) as error:
        if isinstance(error, RoleFailed) and error.returncode == STOPPED:
            _say("stopped as asked: `magistral resume` goes on from what is saved", "yellow")
            raise typer.Exit(STOPPED) from error
        _say(str(error), "red")
        raise typer.Exit(FAILED) from error
    except Stopped as stopped:
        _say(f"{stopped.signal.name}: every process was ended", "yellow")
        raise typer.Exit(SIGNAL_BASE + stopped.signal) from stopped


def _print_plan(config: Config) -> None:
    """The resolved config, which can be saved as it is: the processes follow as comments."""
    inputs = check_inputs(config)
    for warning in inputs.warnings:
        _say(f"warning: {warning}", "yellow")
    stages = planned_roles(config, run_folder_pattern(config), inputs.context_length)
    typer.echo(dump(config))
    for stage, roles in stages.items():
        typer.echo(f"# {stage}: {len(roles)} process{'es' * (len(roles) > 1)}")
        for role in roles:
            typer.echo(f"#   {role.name}: {_shell_line(role)}")


def _shell_line(role: Role) -> str:
    """What would start the role from a shell with our environment."""
    changes = [
        f"{name}={shlex.quote(value)}"
        for name, value in role.environment.items()
        if os.environ.get(name) != value
    ]
    return " ".join([*changes, shlex.join(role.command)])


def _load(path: Path, overrides: list[str] | None, *, check_files: bool = True) -> Config:
    try:
        return load(path, overrides or (), check_files=check_files)
    except ConfigError as error:
        _refuse(str(error))


def _refuse_given(ctx: typer.Context, names: Iterable[str], why: str) -> None:
    """Options that would have no effect are an error."""
    for name in names:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            _refuse(f"--{name.replace('_', '-')}: {why}")


def _refuse(message: str) -> NoReturn:
    _say(message, "red")
    raise typer.Exit(BAD_INPUT)


def _say(message: str, style: str) -> None:
    Console(stderr=True).print(message, style=style, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
