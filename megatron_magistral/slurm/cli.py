"""`magistral slurm`: the parts of a job that the scripts of launch/ put together.

    begin      on the first node: refuse what cannot run, plan who runs where
    stages     the stages that are left, a line each
    node       preflight of one node, on every node
    compare    preflight: do the nodes agree?
    links      preflight: an all-reduce over all GPUs, on every GPU
    role       one task of a role
    stage-done a stage has ended well
    end        what becomes of the job

Exit code 2 for what the user can put right, 75 for "start me again", 1 for a failure.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn, ParamSpec

import typer
from rich.console import Console

from megatron_magistral.cluster import Role, RoleFailed, Supervisor
from megatron_magistral.config_file import ConfigError, load
from megatron_magistral.placement import PlacementError
from megatron_magistral.preflight import Refused
from megatron_magistral.restart_requests import RestartRequests
from megatron_magistral.run_folder import RunBusy, RunFolder, Stage
from megatron_magistral.signals import SIGNAL_BASE, STOPPED, Stopped, stopped_by_signals
from megatron_magistral.slurm.address_book import AddressBook, AddressTimeout, own_address
from megatron_magistral.slurm.begin import begin, stages_left, what_is_safe
from megatron_magistral.slurm.job import JobError, read_job
from megatron_magistral.slurm.node_check import check_node, compare, read_reports, save_report
from megatron_magistral.slurm.outcome import Verdict, judge
from megatron_magistral.slurm.plan import RoleName, read_plan
from megatron_magistral.slurm.role import SERVICES, Context, task_role
from megatron_magistral.trainer.checkpoint_files import CheckpointError

P = ParamSpec("P")

BAD_INPUT = 2
FAILED = 1
_EXIT_CODES = {Verdict.DONE: 0, Verdict.REQUEUE: STOPPED, Verdict.FAIL: FAILED}

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

RunPath = Annotated[Path, typer.Option("--run", help="The run folder, on a shared filesystem.")]

TimeoutS = Annotated[
    float, typer.Option("--timeout-s", help="Longest wait for the addresses of others, seconds.")
]


@app.callback()
def _commands() -> None:
    """The parts of a SLURM job."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")


def _attempted(command: Callable[P, None]) -> Callable[P, None]:
    """What ends the command early, as where there is no job, is a line in the job's log."""

    @functools.wraps(command)
    def attempt(*arguments: P.args, **named: P.kwargs) -> None:
        _attempt(command.__name__, lambda: command(*arguments, **named))

    return attempt


@app.command("begin")
def begin_command(
    config_path: Annotated[Path, typer.Argument(help="A file of configs/.")],
    run_path: RunPath,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    min_time_s: Annotated[
        float, typer.Option(help="The time limit must leave so many seconds.")
    ] = 1200.0,
    allow_changes: Annotated[bool, typer.Option(help="Go on with a changed config.")] = False,
    owner_state: Annotated[
        str, typer.Option(help="SLURM's state of the job that had the run folder.")
    ] = "",
) -> None:
    """On the first node: refuse what cannot run, plan who runs where."""

    def work() -> None:
        console = Console(soft_wrap=True, highlight=False)
        plan = begin(
            read_job(os.environ),
            config_path,
            overrides or (),
            run_path,
            min_time_s=min_time_s,
            allow_changes=allow_changes,
            owner_state=owner_state,
            console=console,
        )
        counts = ", ".join(f"{len(tasks)} {role}" for role, tasks in plan.tasks.items())
        typer.echo(f"run folder: {run_path.resolve()}")
        typer.echo(f"attempt {plan.attempt} on {len(plan.nodes)} nodes: {counts}")

    _attempt("begin", work)


@app.command()
@_attempted
def stages(run_path: RunPath) -> None:
    """The stages that are left, a line each."""
    run = RunFolder(run_path.resolve())
    for stage in stages_left(load(run.config), run):
        typer.echo(stage)


@app.command()
@_attempted
def node(run_path: RunPath) -> None:
    """Preflight of the node that this runs on."""
    name = _variable("SLURMD_NODENAME")
    run = RunFolder(run_path.resolve())
    try:
        plan = read_plan(run, read_job(os.environ).attempt)
    except FileNotFoundError:
        _refuse(f"{name}: {run.root} is not there: the run folder must be on a shared filesystem")
    report = check_node(run, plan, name)
    save_report(report, run, plan.attempt)
    if report.problems:
        _refuse("\n".join(f"{name}: {problem}" for problem in report.problems))


@app.command("compare")
@_attempted
def compare_command(run_path: RunPath) -> None:
    """Whether the nodes agree on what must be the same everywhere."""
    run, job = RunFolder(run_path.resolve()), read_job(os.environ)
    if problems := compare(read_reports(run, job.attempt), job.nodes):
        _refuse("\n".join(problems))
    typer.echo(f"preflight: {len(job.nodes)} nodes are as they must be")


@app.command()
def links(run_path: RunPath, timeout_s: TimeoutS = 60.0) -> None:
    """An all-reduce over all GPUs; one task on each."""
    # torch takes seconds and memory that no other command needs.
    from megatron_magistral.slurm.links import LinkError, check_links, clock_problems

    def work() -> None:
        run, job = RunFolder(run_path.resolve()), read_job(os.environ)
        plan = read_plan(run, job.attempt)
        rank = int(_variable("SLURM_PROCID"))
        nodes = [node for node in plan.nodes for _ in range(plan.places_per_node)]
        book, host = AddressBook(run, plan, "links"), own_address(os.environ)
        address, port = book.rendezvous(rank, host, timeout_s)
        result = check_links(rank, nodes, rank % plan.places_per_node, address, port)
        if rank == 0:
            typer.echo(f"preflight: {result}")
            if problems := clock_problems(result.clocks):
                _refuse("\n".join(problems))

    try:
        _attempt("links", work)
    except LinkError as error:
        _refuse(str(error))


@app.command("role")
@_attempted
def role_command(
    name: Annotated[RoleName, typer.Argument(help="What this task is.")],
    run_path: RunPath,
    stage: Annotated[Stage, typer.Option(help="The stage that the role has a part in.")],
    timeout_s: TimeoutS = 300.0,
) -> None:
    """One task of a role; srun's variables say which."""
    run = RunFolder(run_path.resolve())
    plan = read_plan(run, read_job(os.environ).attempt)
    context = Context(
        config=load(run.config),
        run=run,
        plan=plan,
        book=AddressBook(run, plan, stage),
        stage=stage,
        host=own_address(os.environ),
        timeout_s=timeout_s,
        environment=os.environ,
    )
    index = int(_variable("SLURM_PROCID"))

    def work() -> None:
        role = task_role(name, index, context)
        raise typer.Exit(keep(role, run, stage if name in SERVICES else None))

    _attempt(f"{name} {index} on {plan.at(name, index).node}", work)


@app.command("stage-done")
@_attempted
def stage_done(
    run_path: RunPath, stage: Annotated[Stage, typer.Argument(help="What has ended well.")]
) -> None:
    """The stage is not to be repeated."""
    RunFolder(run_path.resolve()).mark_finished(stage)


@app.command("end")
@_attempted
def end_command(
    run_path: RunPath,
    code: Annotated[int, typer.Option(help="Exit code of the attempt.")],
    max_requeues: Annotated[
        int, typer.Option(help="Restarts of the job after which a failure ends it.")
    ] = 20,
) -> None:
    """What becomes of the job: exit code 0 if it is done, 75 if it is to be requeued."""
    run, job = RunFolder(run_path.resolve()), read_job(os.environ)
    outcome = judge(
        code,
        read_plan(run, job.attempt).safe,
        what_is_safe(load(run.config), run),
        num_restarts=job.num_restarts,
        max_restarts=max_requeues,
    )
    typer.echo(f"{outcome.verdict}: {outcome.why}")
    raise typer.Exit(_EXIT_CODES[outcome.verdict])


class _StageEnded(Exception):
    """A service is not needed any more."""


def keep(role: Role, run: RunFolder, serves: Stage | None) -> int:
    """Run the process of a task, started anew as its policy allows; its exit code, as a shell has
    it. A service never ends by itself, it is ended with the stage that it serves.

    A server that dies is started again where it was, at its address: quicker than a new step.
    """

    def look() -> None:
        if serves is not None and run.is_finished(serves):
            raise _StageEnded

    with Supervisor(requests=RestartRequests(run.restarts), say=_say) as supervisor:
        supervisor.start(role)
        try:
            supervisor.wait_for([role.name], tick=look, tick_s=1.0)
        except _StageEnded:
            return 0
        except RoleFailed as error:
            code = FAILED if error.returncode is None else error.returncode
            if code != STOPPED:
                _say(str(error))
            return code if code >= 0 else SIGNAL_BASE - code
    if serves is None:
        return 0
    _say(f"{role.name} ended although stage {serves} still needs it; see {role.log}")
    return FAILED


def _attempt(who: str, work: Callable[[], object]) -> None:
    """Do it; what ends it early becomes a line in the job's log and an exit code."""
    try:
        with stopped_by_signals():
            work()
    except (
        *(AddressTimeout, CheckpointError, ConfigError),
        *(JobError, PlacementError, Refused, RunBusy),
    ) as error:
        _refuse(f"{who}: {error}")
    except FileNotFoundError as error:
        _refuse(f"{who}: {error.filename}: is not there")
    except Stopped as stopped:
        raise typer.Exit(SIGNAL_BASE + stopped.signal) from stopped


def _variable(name: str) -> str:
    """Of a task of srun. Raises JobError."""
    if name not in os.environ:
        raise JobError(f"{name} is not set: srun sets it")
    return os.environ[name]


def _refuse(message: str) -> NoReturn:
    _say(message)
    raise typer.Exit(BAD_INPUT)


def _say(message: str) -> None:
    typer.echo(message, err=True)
