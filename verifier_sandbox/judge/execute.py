"""Running a program over tests in one slot, and naming what happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from verifier_sandbox.jail.files import SealedFile
from verifier_sandbox.jail.launcher import Launcher, LauncherDiedError
from verifier_sandbox.jail.wire import (
    ABSENT,
    MAX_TESTS,
    Compare,
    Outcome,
    Profile,
    ProgramLimits,
    RunResult,
    Span,
    TestSpans,
)
from verifier_sandbox.judge.checkers import output_matches, result_matches
from verifier_sandbox.protocol import Checker, CheckerKind, Limits, TestResult, Verdict

_NS, _MIB = 1_000_000_000, 1 << 20
_WALL_FACTOR = 30  # a machine that gives a program less than a thirtieth of a core is at fault
_ANSWER_GRACE_S = 30.0
_ACCEPTED, _REJECTED = 0, 1  # exit statuses of checker programs

_LIMITS = {
    Outcome.CPU_LIMIT: Verdict.TIME_LIMIT,
    Outcome.IDLE_LIMIT: Verdict.TIME_LIMIT,
    Outcome.MEMORY_LIMIT: Verdict.MEMORY_LIMIT,
    Outcome.OUTPUT_LIMIT: Verdict.OUTPUT_LIMIT,
    Outcome.THREAD_LIMIT: Verdict.RUNTIME_ERROR,
}


@dataclass(frozen=True)
class Executable:
    """A binary or a Python source, ready to run."""

    file: SealedFile
    profile: Profile


@dataclass(frozen=True)
class PreparedTest:
    """A test's bytes with its index in the problem."""

    test_id: int
    input: bytes
    expected: bytes


@dataclass(frozen=True)
class Job:
    """What is to be run and how to tell right from wrong."""

    submission: Executable
    checker: Checker
    limits: Limits
    is_function_call: bool = False
    helper: Executable | None = None
    """The problem's checker program or interactor."""


@dataclass(frozen=True)
class Ran:
    """A test's result, and whether a busy machine may have changed it."""

    result: TestResult
    in_doubt: bool


async def run_tests(
    launcher: Launcher,
    job: Job,
    tests: Sequence[PreparedTest],
    stop_at_first_failure: bool,
    under_pressure: bool,
) -> list[Ran]:
    """Runs tests in order. Raises LauncherDiedError when the machine was at fault."""
    ran: list[Ran] = []
    run_limits = program_limits(job.submission.profile, job.limits, under_pressure)
    with SealedFile(piece for test in tests for piece in (test.input, test.expected)) as blob:
        spans = _spans(tests)
        while len(ran) < len(tests):
            at = len(ran)
            if job.checker.kind is CheckerKind.INTERACTIVE:
                ran.append(await _interact(launcher, job, tests[at], under_pressure))
            else:
                batch = await launcher.run(
                    [(run_limits, job.submission.file.fd)],
                    blob.fd,
                    spans[at : at + MAX_TESTS],
                    _compare(job),
                    _bound_s([run_limits], min(MAX_TESTS, len(tests) - at)),
                )
                for offset, (run,) in enumerate(batch):
                    ran.append(await _judge(launcher, job, tests[at + offset], run))
            if stop_at_first_failure and ran[-1].result.verdict is not Verdict.OK:
                break
    return ran


def program_limits(profile: Profile, limits: Limits, under_pressure: bool) -> ProgramLimits:
    """A request's limits as the launcher takes them."""
    cpu_ns = int(limits.cpu_s * _NS)
    return ProgramLimits(
        profile,
        cpu_ns=cpu_ns,
        idle_ns=cpu_ns,
        wall_ns=_WALL_FACTOR * cpu_ns,
        memory_bytes=limits.memory_mib * _MIB,
        output_bytes=limits.output_mib * _MIB,
        under_pressure=under_pressure,
    )


def _bound_s(programs: Sequence[ProgramLimits], num_tests: int) -> float:
    """Longer than the launcher can take if it works."""
    return num_tests * max(p.wall_ns + p.idle_ns for p in programs) / _NS + _ANSWER_GRACE_S


def _compare(job: Job) -> Compare:
    if job.checker.kind is CheckerKind.PROGRAM:
        return Compare.NEVER
    return Compare.EXACT if job.checker.kind is CheckerKind.EXACT else Compare.TRIMMED


def _spans(tests: Sequence[PreparedTest]) -> list[TestSpans]:
    lengths = (len(piece) for test in tests for piece in (test.input, test.expected))
    pieces = [Span(a, b - a) for a, b in pairwise(accumulate(lengths, initial=0))]
    return [TestSpans(*pair) for pair in zip(pieces[::2], pieces[1::2], strict=True)]


async def _judge(launcher: Launcher, job: Job, test: PreparedTest, run: RunResult) -> Ran:
    verdict, detail = classify(run)
    if verdict is Verdict.OK and not run.matched:
        output = launcher.output(run.output_bytes)
        if job.checker.kind is CheckerKind.PROGRAM:
            verdict, detail = await _ask_checker(launcher, job, test, output)
        elif job.is_function_call:
            right = result_matches(job.checker, output, test.expected.decode())
            verdict = Verdict.OK if right else Verdict.WRONG_ANSWER
        else:
            right = output_matches(job.checker, output, test.expected)
            verdict = Verdict.OK if right else Verdict.WRONG_ANSWER
    return Ran(_result(test, verdict, detail, run), in_doubt(run))


def classify(run: RunResult) -> tuple[Verdict, str]:
    """The verdict so far (OK: it ended well, its output is still to be compared) and a detail.

    Raises LauncherDiedError for an end that says nothing about the program.
    """
    if run.outcome is Outcome.EXITED:
        if run.code == 0:
            return Verdict.OK, ""
        return Verdict.RUNTIME_ERROR, f"exit status {run.code}"
    if run.outcome is Outcome.SIGNALED:
        if run.code == signal.SIGSYS:
            return Verdict.SECURITY, "forbidden system call"
        # Programs cannot send themselves SIGKILL and we count ours: the machine ran out of memory.
        if run.code == signal.SIGKILL:
            raise LauncherDiedError("program killed from outside (out of memory?)")
        return Verdict.RUNTIME_ERROR, _signal_name(run.code)
    if verdict := _LIMITS.get(run.outcome):
        return verdict, run.outcome.name.lower()
    reason = os.strerror(run.code) if run.outcome is Outcome.START_FAILED else "no core to run on"
    raise LauncherDiedError(f"{run.outcome.name} at stage {run.stage}: {reason}")


def in_doubt(run: RunResult) -> bool:
    """Whether a quieter machine might have said otherwise.

    Under pressure the launcher lets a program run to 1.5 times its limit. Killed there, it is too
    slow on any machine; ended by itself, it may have been slowed down.
    """
    if run.outcome is Outcome.IDLE_LIMIT:
        return run.wait_ns > run.wall_ns // 5
    return run.outcome is Outcome.CPU_LIMIT and run.code != signal.SIGKILL


def _result(test: PreparedTest, verdict: Verdict, detail: str, run: RunResult) -> TestResult:
    return TestResult(
        test_id=test.test_id,
        verdict=verdict,
        cpu_ms=run.cpu_ns / 1e6,
        wall_ms=run.wall_ns / 1e6,
        peak_memory_mib=run.peak_bytes / _MIB,
        detail=detail,
    )


async def _ask_checker(
    launcher: Launcher, job: Job, test: PreparedTest, output: bytes
) -> tuple[Verdict, str]:
    assert job.helper is not None
    limits = program_limits(job.helper.profile, job.limits, under_pressure=True)
    pieces = [output, test.input, test.expected]
    with SealedFile(pieces) as blob:
        ends = list(accumulate(map(len, pieces), initial=0))
        given, *aux = (Span(a, b - a) for a, b in pairwise(ends))
        spans = TestSpans(given, ABSENT, (aux[0], aux[1]))
        programs = [(limits, job.helper.file.fd)]
        bound_s = _bound_s([limits], 1)
        answer = await launcher.run(programs, blob.fd, [spans], Compare.NEVER, bound_s)
    return _checker_verdict(answer[0][0])


def _checker_verdict(run: RunResult) -> tuple[Verdict, str]:
    if run.outcome is Outcome.EXITED and run.code == _ACCEPTED:
        return Verdict.OK, ""
    if run.outcome is Outcome.EXITED and run.code == _REJECTED:
        return Verdict.WRONG_ANSWER, ""
    return (
        Verdict.INFRASTRUCTURE,
        f"checker program failed: {run.outcome.name} {run.code}",
    )


async def _interact(launcher: Launcher, job: Job, test: PreparedTest, pressed: bool) -> Ran:
    """Submission and interactor over crossed pipes."""
    assert job.helper is not None
    limits = program_limits(job.submission.profile, job.limits, pressed)
    other = program_limits(job.helper.profile, job.limits, under_pressure=True)
    pair = [limits, other]
    files = [job.submission.file.fd, job.helper.file.fd]
    with SealedFile([test.input, test.expected]) as blob:
        middle, end = len(test.input), len(test.input) + len(test.expected)
        aux = (Span(0, middle), Span(middle, end - middle))
        answer = await launcher.run(
            list(zip(pair, files, strict=True)),
            blob.fd,
            [TestSpans(ABSENT, ABSENT, aux)],
            Compare.NEVER,
            _bound_s(pair, 1),
        )
    submission, interactor = answer[0]
    verdict, detail = _interaction_verdict(submission, interactor)
    return Ran(_result(test, verdict, detail, submission), in_doubt(submission))


def _interaction_verdict(submission: RunResult, interactor: RunResult) -> tuple[Verdict, str]:
    """Who ended first tells a crash from the broken pipe after a rejection."""
    verdict, detail = classify(submission)
    rejected = interactor.outcome is Outcome.EXITED and interactor.code == _REJECTED
    if verdict in (Verdict.OK, Verdict.RUNTIME_ERROR):
        if rejected and (verdict is Verdict.OK or interactor.ended_ns <= submission.ended_ns):
            return Verdict.WRONG_ANSWER, ""
        if verdict is Verdict.OK:
            return _checker_verdict(interactor)
    return verdict, detail


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
