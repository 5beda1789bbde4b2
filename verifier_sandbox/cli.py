"""The command line: `serve`, `run` and `selftest`."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from verifier_sandbox.battery import Case, cases
from verifier_sandbox.jail.build import BuildError
from verifier_sandbox.jail.machine import IsolationError
from verifier_sandbox.protocol import (
    Checker,
    CheckerKind,
    JudgeRequest,
    JudgeResult,
    Language,
    Limits,
    Test,
    Verdict,
)
from verifier_sandbox.server import ServerSettings
from verifier_sandbox.server import serve as serve_forever
from verifier_sandbox.service import describe, running

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

_FAILED, _BAD_INPUT, _CANNOT_JUDGE = 1, 2, 3
_LANGUAGES = {".py": Language.PYTHON}
_LANGUAGES |= dict.fromkeys((".cpp", ".cc", ".cxx", ".c++"), Language.CPP)
_ANSWER_SUFFIXES = (".out", ".ans")

NumSlots = Annotated[int | None, typer.Option(help="Programs at once [default: cores].")]


@app.callback()
def _commands() -> None:
    """The code judge: hostile programs in, verdicts out."""


@app.command()
def serve(
    socket: Annotated[Path | None, typer.Option(help="Listen on this unix socket.")] = None,
    host: Annotated[str, typer.Option(help="Listen on this address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Listen on this port.")] = 8900,
    num_slots: NumSlots = None,
    num_maths_workers: Annotated[int, typer.Option(help="Maths checks at once.")] = 1,
    max_queue: Annotated[int | None, typer.Option(help="Submissions that may wait.")] = None,
    outlive_parent: Annotated[bool, typer.Option(help="Go on when the parent ends.")] = False,
) -> None:
    """Serve this node until SIGTERM or the end of the parent process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = ServerSettings(
        socket=socket,
        host=host,
        port=port,
        num_slots=num_slots,
        num_maths_workers=num_maths_workers,
        max_queue=max_queue,
        outlive_parent=outlive_parent,
    )
    try:
        serve_forever(settings)
    except (IsolationError, BuildError) as error:
        raise _cannot_judge(error) from error


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="A .py or .cpp file.", exists=True)],
    tests: Annotated[Path, typer.Option(help="Holds NAME.in and NAME.out (or .ans).", exists=True)],
    checker: Annotated[CheckerKind, typer.Option(help="How outputs are compared.")] = (
        CheckerKind.TOKENS
    ),
    cpu_s: Annotated[float, typer.Option(help="CPU time of a test.")] = 4.0,
    memory_mib: Annotated[int, typer.Option(help="Peak memory of a test.")] = 300,
    num_slots: NumSlots = 1,
) -> None:
    """Judge one file on the tests of a directory; exit status 0 only if it passes them all."""
    if (language := _LANGUAGES.get(file.suffix)) is None:
        raise typer.BadParameter(f"{file}: must end in one of {', '.join(_LANGUAGES)}")
    named = _read_tests(tests)
    request = JudgeRequest(
        language=language,
        source=file.read_text(encoding="utf-8"),
        tests=list(named.values()),
        problem_id=str(tests),
        group=str(file),
        num_tests=len(named),
        stop_at_first_failure=False,
        checker=Checker(kind=checker),
        limits=Limits(cpu_s=cpu_s, memory_mib=memory_mib),
    )
    result = _judge_all([request], num_slots)[0][0]
    _show(result, list(named))
    if result.verdict is not Verdict.OK:
        raise typer.Exit(_FAILED)


@app.command()
def selftest(
    num_slots: NumSlots = None,
    no_slot_uids: Annotated[bool, typer.Option(help="As if CAP_SETUID were missing.")] = False,
) -> None:
    """Run the attack battery on this machine and print how well it is isolated."""
    battery = [case for language in Language for case in cases(language)]
    results, isolation = _judge_all([case.request() for case in battery], num_slots, no_slot_uids)
    wrong = [(c, r) for c, r in zip(battery, results, strict=True) if r.verdict is not c.verdict]
    console = Console()
    console.print(f"isolation: {isolation}", highlight=False)
    if wrong:
        console.print(_mismatches(wrong))
    console.print(f"{len(battery) - len(wrong)} of {len(battery)} programs judged as they must be")
    if wrong:
        raise typer.Exit(_FAILED)


def _judge_all(
    requests: list[JudgeRequest], num_slots: int | None, no_slot_uids: bool = False
) -> tuple[list[JudgeResult], str]:
    """Results in order, and the isolation they were made under."""

    async def judge() -> tuple[list[JudgeResult], str]:
        async with running(num_slots, use_slot_uids=not no_slot_uids) as service:
            results = await asyncio.gather(*map(service.judge.judge, requests))
            return results, describe(service.jail.machine)

    try:
        return asyncio.run(judge())
    except (IsolationError, BuildError) as error:
        raise _cannot_judge(error) from error


def _cannot_judge(error: Exception) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(_CANNOT_JUDGE)


def _read_tests(directory: Path) -> dict[str, Test]:
    """Tests by name. Raises BadParameter where an input lacks its answer, or there is none."""
    named = {}
    for given in sorted(directory.glob("*.in"), key=_natural):
        answers = [given.with_suffix(suffix) for suffix in _ANSWER_SUFFIXES]
        answer = next((path for path in answers if path.exists()), None)
        if answer is None:
            raise typer.BadParameter(f"{given}: there is no {answers[0].name} or {answers[1].name}")
        named[given.stem] = Test(given.read_text("utf-8"), answer.read_text("utf-8"))
    if not named:
        raise typer.BadParameter(f"{directory}: holds no *.in files")
    return named


def _natural(path: Path) -> tuple[int, str]:
    """2.in before 10.in."""
    return (int(path.stem), "") if path.stem.isdecimal() else (1 << 62, path.stem)


def _show(result: JudgeResult, names: list[str]) -> None:
    console = Console()
    table = Table("test", "verdict", "CPU ms", "peak MiB", "detail")
    for test in result.per_test:
        numbers = (f"{test.cpu_ms:.1f}", f"{test.peak_memory_mib:.1f}")
        table.add_row(names[test.test_id], test.verdict.value, *numbers, test.detail)
    if result.per_test:
        console.print(table)
    if result.compile and result.compile.messages:
        console.print(result.compile.messages, markup=False, highlight=False)
    console.print(f"{result.verdict.value}: {result.num_passed} of {result.num_tests} tests passed")
    if not result.per_test and result.detail:
        console.print(result.detail, markup=False)


def _mismatches(wrong: list[tuple[Case, JudgeResult]]) -> Table:
    table = Table("program", "must be", "was", "detail")
    for case, result in wrong:
        table.add_row(case.id, case.verdict.value, result.verdict.value, result.detail)
    return table
