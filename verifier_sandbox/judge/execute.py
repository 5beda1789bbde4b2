"""Running a program over tests in one slot, and comparing what it wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from verifier_sandbox.jail.files import SealedFile
from verifier_sandbox.jail.launcher import Launcher
from verifier_sandbox.jail.wire import (
    MAX_TESTS,
    Compare,
    ProgramLimits,
    RunResult,
    Span,
    TestSpans,
)
from verifier_sandbox.judge.checkers import output_matches, result_matches
from verifier_sandbox.judge.helpers import Opinion, ask_checker, interact
from verifier_sandbox.judge.job import MIB, Job, PreparedTest, bound_s, program_limits
from verifier_sandbox.judge.outcomes import classify, in_doubt
from verifier_sandbox.protocol import CheckerKind, TestResult, Verdict

# Comparing less takes less than handing it to another thread.
_COMPARED_IN_PLACE_BYTES = 1 << 14


@dataclass(frozen=True)
class Ran:
    """A test's result, and what else is to be known of it."""

    result: TestResult
    in_doubt: bool
    """Whether a busy machine may have changed it."""
    helper_failed: bool
    """Whether the checker program or interactor crashed or reached a limit on it."""


async def run_tests(
    launcher: Launcher,
    job: Job,
    tests: Sequence[PreparedTest],
    stop_at_first_failure: bool,
    under_pressure: bool,
) -> list[Ran]:
    """Runs tests in order. Raises LauncherDiedError when the machine was at fault."""
    ran: list[Ran] = []
    limits = program_limits(job.submission.profile, job.limits, under_pressure)
    with SealedFile(piece for test in tests for piece in (test.input, test.expected)) as blob:
        spans = _spans(tests)
        while len(ran) < len(tests):
            at = len(ran)
            if job.checker.kind is CheckerKind.INTERACTIVE:
                opinion, run = await interact(launcher, job, tests[at], limits)
                ran.append(_ran(tests[at], opinion, run, limits))
            else:
                batch = await launcher.run(
                    [(limits, job.submission.file.fd)],
                    blob.fd,
                    spans[at : at + MAX_TESTS],
                    _compare(job),
                    bound_s([limits], min(MAX_TESTS, len(tests) - at)),
                )
                for offset, (run,) in enumerate(batch):
                    ran.append(await _judge(launcher, job, tests[at + offset], run, limits))
            if stop_at_first_failure and ran[-1].result.verdict is not Verdict.OK:
                break
    return ran


def _compare(job: Job) -> Compare:
    if job.checker.kind is CheckerKind.PROGRAM:
        return Compare.NEVER
    return Compare.EXACT if job.checker.kind is CheckerKind.EXACT else Compare.TRIMMED


def _spans(tests: Sequence[PreparedTest]) -> list[TestSpans]:
    lengths = (len(piece) for test in tests for piece in (test.input, test.expected))
    pieces = [Span(a, b - a) for a, b in pairwise(accumulate(lengths, initial=0))]
    return [TestSpans(*pair) for pair in zip(pieces[::2], pieces[1::2], strict=True)]


async def _judge(
    launcher: Launcher, job: Job, test: PreparedTest, run: RunResult, limits: ProgramLimits
) -> Ran:
    opinion = Opinion(*classify(run, limits))
    if opinion.verdict is Verdict.OK and not run.matched:
        output = launcher.output(run.output_bytes)
        if job.checker.kind is CheckerKind.PROGRAM:
            opinion = await ask_checker(launcher, job, test, output)
        elif not await _matches(job, test, output):
            opinion = Opinion(Verdict.WRONG_ANSWER)
    return _ran(test, opinion, run, limits)


async def _matches(job: Job, test: PreparedTest, output: bytes) -> bool:
    """Compares a long output in a thread, so that the service goes on answering meanwhile; at
    most one for each slot, and each for a time linear in the output."""
    if len(output) <= _COMPARED_IN_PLACE_BYTES:
        return _compare_now(job, test, output)
    return await asyncio.to_thread(_compare_now, job, test, output)


def _compare_now(job: Job, test: PreparedTest, output: bytes) -> bool:
    if job.is_function_call:
        return result_matches(job.checker, output, test.expected.decode("utf-8", "surrogatepass"))
    return output_matches(job.checker, output, test.expected)


def _ran(test: PreparedTest, opinion: Opinion, run: RunResult, limits: ProgramLimits) -> Ran:
    result = TestResult(
        test_id=test.test_id,
        verdict=opinion.verdict,
        cpu_ms=run.cpu_ns / 1e6,
        wall_ms=run.wall_ns / 1e6,
        peak_memory_mib=run.peak_bytes / MIB,
        detail=opinion.detail,
    )
    return Ran(result, in_doubt(run, limits), opinion.failed)
