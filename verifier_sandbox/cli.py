"""The command line: `serve`, `run` and `selftest`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from verifier_sandbox.battery import Case, cases
from verifier_sandbox.jail.build import BuildError
from verifier_sandbox.jail.machine import IsolationError
from verifier_sandbox.judge.judge import BadRequestError
from verifier_sandbox.protocol import (
    Checker,
    CheckerKind,
    JudgeRequest,
    JudgeResult,
    Language,
    Limits,
    Program,
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
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_T = TypeVar("_T")

NumSlots = Annotated[int | None, typer.Option(help="Programs at once; one a core if not given.")]


@app.callback()
def _commands() -> None:
    """The code judge: hostile programs in, verdicts out."""


@app.command()
def serve(
    socket: Annotated[
        Path | None, typer.Option(help="Listen on this unix socket, not host and port.")
    ] = None,
    host: Annotated[str, typer.Option(help="Listen on this address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Listen on this port.")] = 8900,
    num_slots: NumSlots = None,
    num_maths_workers: Annotated[int, typer.Option(help="Maths checks at once.")] = 1,
    max_queue: Annotated[int | None, typer.Option(help="Submissions that may wait.")] = None,
    outlive_parent: Annotated[bool, typer.Option(help="Go on when the parent ends.")] = False,
) -> None:
    """Serve this node until SIGTERM or the end of the parent process."""
    _require_at_least(1, num_slots=num_slots, num_maths_workers=num_maths_workers)
    _require_at_least(0, max_queue=max_queue)
    _log_to_standard_error()
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
    file: Annotated[Path, typer.Argument(help="A .py or .cpp file.")],
    tests: Annotated[Path, typer.Option(help="Holds NAME.in and NAME.out (or .ans).")],
    checker: Annotated[CheckerKind, typer.Option(help="How outputs are compared.")] = (
        CheckerKind.TOKENS
    ),
    checker_file: Annotated[
        Path | None,
        typer.Option(help="The .py or .cpp file of a checker `program` or `interactive`."),
    ] = None,
    cpu_s: Annotated[float, typer.Option(help="CPU time of a test, seconds.")] = 4.0,
    memory_mib: Annotated[int, typer.Option(help="Peak memory of a test, MiB.")] = 300,
    num_slots: Annotated[int, typer.Option(help="Programs at once.")] = 1,
) -> None:
    """Judge one file on the tests of a directory; exit status 0 only if it passes them all, 1 if
    it does not, 2 for bad input, 3 where nothing can be judged."""
    _require_at_least(1, num_slots=num_slots)
    program = None if checker_file is None else _program(checker_file)
    submission = _program(file)
    named = _read_tests(tests)
    limits = _valid(lambda: Limits(cpu_s=cpu_s, memory_mib=memory_mib))
    compared = _valid(lambda: Checker(kind=checker, program=program))
    request = _valid(
        lambda: JudgeRequest(
            language=submission.language,
            source=submission.source,
            tests=list(named.values()),
            problem_id=str(tests),
            group=str(file),
            num_tests=len(named),
            stop_at_first_failure=False,
            checker=compared,
            limits=limits,
        )
    )
    result = _judge_all([request], num_slots)[0][0]
    _show(result, list(named))
    if result.verdict is not Verdict.OK:
        raise typer.Exit(_FAILED)


@app.command()
def selftest(
    num_slots: NumSlots = None,
    no_slot_uids: Annotated[
        bool, typer.Option("--no-slot-uids", help="As if CAP_SETUID were missing.")
    ] = False,
) -> None:
    """Run the attack battery on this machine and print how well it is isolated."""
    _require_at_least(1, num_slots=num_slots)
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
    except BadRequestError as error:
        raise _bad_input(str(error)) from error
    except (IsolationError, BuildError) as error:
        raise _cannot_judge(error) from error


def _log_to_standard_error() -> None:
    """Whatever the program around us has set up for its own log."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    ours = logging.getLogger("verifier_sandbox")
    ours.handlers = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False


def _cannot_judge(error: Exception) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(_CANNOT_JUDGE)


def _bad_input(message: str) -> typer.Exit:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return typer.Exit(_BAD_INPUT)


def _require_at_least(least: int, **options: int | None) -> None:
    for name, value in options.items():
        if value is not None and value < least:
            raise _bad_input(f"--{name.replace('_', '-')} {value}: must be at least {least}")


def _valid(make: Callable[[], _T]) -> _T:
    """A part of the request, or one line for each of its faults."""
    try:
        return make()
    except ValidationError as error:
        raise _bad_input("; ".join(map(_fault, error.errors()))) from error


def _fault(error: Any) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return f"{message} (see --checker-file)" if "program is" in message else message
    name, value = ".".join(map(str, error["loc"])), error["input"]
    if isinstance(value, int | float):
        name = f"--{name.replace('_', '-')} {value}"
    return f"{name}: {message[:1].lower()}{message[1:]}"


def _program(path: Path) -> Program:
    if (language := _LANGUAGES.get(path.suffix)) is None:
        raise _bad_input(f"{path}: must end in one of {', '.join(_LANGUAGES)}")
    return Program(language=language, source=_read(path))


def _read(path: Path) -> str:
    """The file's text as it is, line ends included."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise _bad_input(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _bad_input(f"{path}: is no UTF-8 text at byte {error.start}") from error


def _read_tests(directory: Path) -> dict[str, Test]:
    """Tests by name. Bad input where an input lacks its answer, or there is none."""
    if not directory.is_dir():
        raise _bad_input(f"{directory}: is no directory")
    named = {}
    for given in sorted(directory.glob("*.in"), key=_natural):
        answers = [given.with_suffix(suffix) for suffix in _ANSWER_SUFFIXES]
        answer = next((path for path in answers if path.exists()), None)
        if answer is None:
            raise _bad_input(f"{given}: there is no {answers[0].name} or {answers[1].name}")
        named[given.stem] = Test(_read(given), _read(answer))
    if not named:
        raise _bad_input(f"{directory}: holds no *.in files")
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
