"""`magistral`: the command line. Exit code 2 for what the user can put right, 1 for a failed run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from megatron_magistral.cluster import RoleFailed, StageTimeout
from megatron_magistral.config import Config
from megatron_magistral.config_file import ConfigError, dump, load
from megatron_magistral.doctor import as_table, examine, failures
from megatron_magistral.launcher import Refused, planned_roles, train
from megatron_magistral.run_folder import RunFolder
from verifier_sandbox.cli import app as sandbox_app
from verifier_sandbox.mathcheck.audit import app as audit_app

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(sandbox_app, name="sandbox", help="The code judge: serve, run, selftest.")
app.add_typer(audit_app, name="audit", help="Measure the maths check on pairs of answers.")

ConfigPath = Annotated[Path, typer.Argument(help="A file of configs/.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value ...")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print config and processes, start none.")]


@app.command("train")
def train_command(
    config_path: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False
) -> None:
    """Run every stage of a config: SFT where it has one, then RL."""
    _start(_load(config_path, overrides), dry_run)


@app.command("sft")
def sft_command(
    config_path: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False
) -> None:
    """Run the SFT stage of a config alone."""
    config = _load(config_path, overrides)
    if config.sft is None:
        _refuse(f"{config_path}: has no sft section")
    _start(config.model_copy(update={"rl": None}), dry_run)


@app.command()
def doctor() -> None:
    """Check this machine for every role."""
    findings = examine()
    Console().print(as_table(findings))
    raise typer.Exit(FAILED if failures(findings) else 0)


def _start(config: Config, dry_run: bool) -> None:
    console = Console()
    for warning in config.warnings():
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    if dry_run:
        _print_plan(config, console)
        return
    try:
        train(config, console)
    except (Refused, ConfigError) as error:
        _refuse(str(error))
    except (RoleFailed, StageTimeout) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(FAILED) from error
    except KeyboardInterrupt as error:
        console.print("interrupted: every process was ended", style="yellow")
        raise typer.Exit(INTERRUPTED) from error


def _print_plan(config: Config, console: Console) -> None:
    console.print(dump(config), highlight=False, markup=False)
    table = Table("process", "command", title="Processes, in the order of their start")
    for role in planned_roles(config, RunFolder(config.run.directory / config.run.name)):
        table.add_row(role.name, " ".join(role.command))
    console.print(table)


def _load(path: Path, overrides: list[str] | None) -> Config:
    try:
        return load(path, overrides or ())
    except ConfigError as error:
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(BAD_INPUT)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    app()


if __name__ == "__main__":
    main()
