"""The judge: one request in, one verdict out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from verifier_sandbox.jail.files import SealedFile
from verifier_sandbox.jail.launcher import Jail, Launcher, LauncherDiedError
from verifier_sandbox.jail.wire import Profile
from verifier_sandbox.judge.checkers import parse_json
from verifier_sandbox.judge.compile import Compilation, CompileCache, compile_cpp
from verifier_sandbox.judge.draw import draw
from verifier_sandbox.judge.execute import Ran, run_tests
from verifier_sandbox.judge.function_call import with_driver
from verifier_sandbox.judge.helpers import SILENT_CPP, Trials, fault_of, interactor_source
from verifier_sandbox.judge.job import Executable, Job, PreparedTest
from verifier_sandbox.pool import SlotPool
from verifier_sandbox.protocol import (
    CheckerKind,
    CompileResult,
    JudgeRequest,
    JudgeResult,
    Language,
    Limits,
    TestResult,
    Verdict,
    infrastructure,
)

log = logging.getLogger(__name__)

_PRESSURE = Path("/proc/pressure/cpu")
_PRESSED_PERCENT = 10.0
_HELPER_COMPILE_CPU_S = 30.0


class BadRequestError(ValueError):
    """The request asks for what cannot be judged."""


class _HelperFault(Exception):
    """The problem's checker program or interactor can judge nobody."""


class Judge:
    """Judges submissions on a pool of slots."""

    def __init__(self, jail: Jail, pool: SlotPool) -> None:
        self._jail = jail
        self._pool = pool
        self.cache = CompileCache(jail.toolchain)
        self._trials = Trials()
        self.num_internal_errors = 0
        """Submissions on which the judge itself failed."""
        self.num_helper_failures = 0
        """Tests on which a sound checker program or interactor crashed or reached a limit."""

    async def judge(self, request: JudgeRequest) -> JudgeResult:
        """The verdict; INFRASTRUCTURE where the machine, the problem's checker program or the judge
        itself failed, or the deadline passed.

        Raises BadRequestError.
        """
        record = _Record()
        try:
            async with asyncio.timeout(request.deadline_s):
                return await self._judge(request, record)
        except TimeoutError as error:
            limit_s = request.deadline_s
            reason = str(error) if limit_s is None else f"deadline of {limit_s:g} s passed"
            detail = f"{reason} while {record.phase}"
        except (LauncherDiedError, OSError) as error:
            detail = f"{record.phase}: {error}"
        except _HelperFault as fault:
            detail = str(fault)
        except BadRequestError:
            raise
        except Exception as error:  # one submission's trouble must not be its whole node's
            self.num_internal_errors += 1
            log.exception("internal error while %s (%s)", record.phase, request.problem_id)
            detail = f"internal error while {record.phase}: {type(error).__name__}: {error}"
        return infrastructure(
            detail,
            num_retries=record.num_retries,
            num_tests=len(record.test_ids),
            test_ids=record.test_ids,
        )

    async def _judge(self, request: JudgeRequest, record: _Record) -> JudgeResult:
        ids, tests = draw(request)
        record.test_ids = list(ids)
        if request.function_name is not None:
            _check_json(tests)
        prepared = [
            PreparedTest(i, _encode(test.input), _encode(test.output))
            for i, test in zip(ids, tests, strict=True)
        ]
        compilation, cached, executable = await self._prepare(
            request.language, _source(request), request.limits, record
        )
        record.has_compiled = compilation is not None and not cached
        compiled = None
        if compilation is not None:
            compiled = CompileResult(
                cpu_ms=compilation.cpu_ms, cached=cached, messages=compilation.messages
            )
        if executable is None:
            return JudgeResult(
                verdict=Verdict.COMPILE_ERROR,
                num_tests=len(ids),
                test_ids=record.test_ids,
                compile=compiled,
                num_retries=record.num_retries,
            )
        job = await self._job(request, executable, prepared[0], record)
        results = await self._run(job, prepared, request.stop_at_first_failure, record)
        return _summary(results, record, compiled)

    async def _job(
        self, request: JudgeRequest, submission: Executable, test: PreparedTest, record: _Record
    ) -> Job:
        """With the problem's own program, tried on `test` if it never was. Raises _HelperFault."""
        is_call = request.function_name is not None
        if (program := request.checker.program) is None:
            return Job(submission, request.checker, request.limits, is_call)
        source = program.source
        if request.checker.kind is CheckerKind.INTERACTIVE and program.language is Language.CPP:
            source = interactor_source(source)
        limits = request.limits.model_copy(update={"compile_cpu_s": _HELPER_COMPILE_CPU_S})
        compilation, _, helper = await self._prepare(program.language, source, limits, record)
        if helper is None:
            messages = compilation.messages if compilation else ""
            raise BadRequestError(f"checker program does not compile: {messages[:500]}")
        job = Job(submission, request.checker, request.limits, is_call, helper)
        key = self._trials.key(request.problem_id, request.checker.kind, source)
        async with self._trials.lock(key):
            if not self._trials.is_sound(key):
                await self._try_helper(job, test, record)
                self._trials.passed(key)
        return job

    async def _try_helper(self, job: Job, test: PreparedTest, record: _Record) -> None:
        """Raises _HelperFault if it fails where no submission can be to blame."""
        silent = None
        if job.checker.kind is CheckerKind.INTERACTIVE:
            _, _, silent = await self._prepare(Language.CPP, SILENT_CPP, job.limits, record)
        record.phase = "trying the checker program"
        async with self._pool.slot() as slot:

            async def work(launcher: Launcher) -> str | None:
                return await fault_of(launcher, job, test, silent)

            fault = await slot.attempt(work, record.count_retry)
        if fault is not None:
            raise _HelperFault(fault)

    async def _prepare(
        self, language: Language, source: str, limits: Limits, record: _Record
    ) -> tuple[Compilation | None, bool, Executable | None]:
        """Compilation (C++ only), whether it was remembered, and the executable if there is one."""
        if language is Language.PYTHON:
            if self._jail.interpreter is None:
                raise BadRequestError(
                    f"Python is not judged at isolation tier {self._jail.machine.tier.name}"
                )
            file = SealedFile([_encode(source)], "solution.py")
            return None, False, Executable(file, Profile.PYTHON)
        compilation, cached = await self._compile(source, limits.compile_cpu_s, record)
        if compilation.binary is None:
            return compilation, cached, None
        static = self._jail.toolchain.is_static
        profile = Profile.CPP_STATIC if static else Profile.CPP_DYNAMIC
        return compilation, cached, Executable(compilation.binary, profile)

    async def _compile(
        self, source: str, cpu_s: float, record: _Record
    ) -> tuple[Compilation, bool]:
        record.phase = "compiling"
        async with self.cache.lock(source):
            if found := self.cache.get(source):
                return found, True
            async with self._pool.slot() as slot:

                async def work(launcher: Launcher) -> tuple[Compilation, bool]:
                    return await compile_cpp(launcher, self._jail.toolchain, source, cpu_s)

                compilation, memorable = await slot.attempt(work, record.count_retry)
            if memorable:
                self.cache.put(source, compilation)
            return compilation, False

    async def _run(
        self, job: Job, tests: Sequence[PreparedTest], stop: bool, record: _Record
    ) -> list[TestResult]:
        """Runs tests; one whose time limit is in doubt is run again alone, before the rest."""
        results: list[TestResult] = []
        while len(results) < len(tests):
            record.phase = f"running test {tests[len(results)].test_id}"
            ran = await self._attempt(job, tests[len(results) :], stop, record)
            doubtful = next((i for i, one in enumerate(ran) if one.in_doubt), None)
            if doubtful is None:
                results += [one.result for one in ran]
            else:
                results += [one.result for one in ran[:doubtful]]
                test = tests[len(results)]
                record.num_reruns += 1
                record.phase = f"running test {test.test_id} again alone"
                alone = await self._attempt(job, [test], stop, record, exclusive=True)
                ran = ran[:doubtful] + alone
                results.append(alone[0].result)
            self.num_helper_failures += sum(one.helper_failed for one in ran)
            if stop and results[-1].verdict is not Verdict.OK:
                break
        return results

    async def _attempt(
        self,
        job: Job,
        tests: Sequence[PreparedTest],
        stop: bool,
        record: _Record,
        exclusive: bool = False,
    ) -> list[Ran]:
        begun, record.has_compiled = record.has_compiled, False  # what it waited for has begun
        async with self._pool.slot(exclusive=exclusive, first=begun) as slot:
            pressed = not exclusive and under_pressure()

            async def work(launcher: Launcher) -> list[Ran]:
                return await run_tests(launcher, job, tests, stop, pressed)

            return await slot.attempt(work, record.count_retry)


class _Record:
    """What happened on the way, for the answer."""

    def __init__(self) -> None:
        self.phase = "waiting"
        self.test_ids: list[int] = []
        self.num_retries = 0
        self.num_reruns = 0
        self.has_compiled = False
        """Whether it has just had its turn for a compilation, and now waits to run."""

    def count_retry(self) -> None:
        self.num_retries += 1


def under_pressure() -> bool:
    """Whether tasks of this machine have waited for a core in the last ten seconds."""
    try:
        first = _PRESSURE.read_text().splitlines()[0]
        return float(first.split("avg10=")[1].split()[0]) > _PRESSED_PERCENT
    except (OSError, IndexError, ValueError):
        return True  # cannot tell: give the benefit of the doubt


def _source(request: JudgeRequest) -> str:
    if request.function_name is None:
        return request.source
    return with_driver(request.source, request.function_name)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _check_json(tests: Sequence[tuple[str, str]]) -> None:
    for arguments, expected in tests:
        try:
            if not isinstance(parse_json(arguments), list):
                raise BadRequestError(f"test input {arguments[:80]!r}: must be a JSON array")
            parse_json(expected)
        except (ValueError, RecursionError) as error:
            if isinstance(error, BadRequestError):
                raise
            raise BadRequestError(f"function-call tests must be JSON: {error}") from error


def _summary(
    results: Sequence[TestResult], record: _Record, compiled: CompileResult | None
) -> JudgeResult:
    failed = next((one for one in results if one.verdict is not Verdict.OK), None)
    return JudgeResult(
        verdict=failed.verdict if failed else Verdict.OK,
        num_passed=sum(one.verdict is Verdict.OK for one in results),
        num_tests=len(record.test_ids),
        test_ids=record.test_ids,
        per_test=list(results),
        compile=compiled,
        detail=f"test {failed.test_id}: {failed.detail}".rstrip(": ") if failed else "",
        num_reruns=record.num_reruns,
        num_retries=record.num_retries,
    )
