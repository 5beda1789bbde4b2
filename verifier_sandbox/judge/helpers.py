"""Programs of the problem's author: checkers, which read an output, and interactors, which talk.

They are trusted but not perfect, and what they read is hostile. So that no submission can choose
INFRASTRUCTURE, each is tried once on something harmless: a checker on an expected output, an
interactor on a partner that leaves without a word. One that does not end there with status 0 or 1
is at fault, whatever is submitted. One that does, and later crashes or reaches a limit on what a
submission said, makes that a wrong answer (for an interactor at a limit, an output limit).
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from weakref import WeakValueDictionary

from verifier_sandbox.jail.files import SealedFile
from verifier_sandbox.jail.launcher import Launcher, LauncherDiedError
from verifier_sandbox.jail.wire import (
    ABSENT,
    Compare,
    Outcome,
    ProgramLimits,
    RunResult,
    Span,
    TestSpans,
)
from verifier_sandbox.judge.job import Executable, Job, PreparedTest, bound_s, helper_limits
from verifier_sandbox.judge.outcomes import classify
from verifier_sandbox.protocol import CheckerKind, Verdict

_ACCEPTED, _REJECTED = 0, 1  # exit statuses
_EXHAUSTED = (Outcome.CPU_LIMIT, Outcome.MEMORY_LIMIT)
_MAX_REMEMBERED = 4096

SILENT_CPP = "int main() {}"
"""The partner on which interactors are tried."""

# A submission that has left must not kill its interactor by SIGPIPE; Python ignores it by itself.
_CPP_PRELUDE = """#include <csignal>
namespace { const auto ignores_broken_pipes = std::signal(SIGPIPE, SIG_IGN); }
#line 1
"""


def interactor_source(source: str) -> str:
    """A C++ interactor that outlives its partner."""
    return _CPP_PRELUDE + source


@dataclass(frozen=True)
class Opinion:
    """What a helper said of a submission; `failed` where it crashed or reached a limit instead."""

    verdict: Verdict
    detail: str = ""
    failed: bool = False


async def ask_checker(launcher: Launcher, job: Job, test: PreparedTest, output: bytes) -> Opinion:
    """Runs the checker program on an output. Raises LauncherDiedError."""
    assert job.helper is not None
    limits = helper_limits(job.helper.profile, job.limits)
    pieces = [output, test.input, test.expected]
    with SealedFile(pieces) as blob:
        ends = list(accumulate(map(len, pieces), initial=0))
        given, *aux = (Span(a, b - a) for a, b in pairwise(ends))
        spans = TestSpans(given, ABSENT, (aux[0], aux[1]))
        programs = [(limits, job.helper.file.fd)]
        longest_s = bound_s([limits], 1)
        answer = await launcher.run(programs, blob.fd, [spans], Compare.NEVER, longest_s)
    return _opinion("checker program", answer[0][0])


async def interact(
    launcher: Launcher, job: Job, test: PreparedTest, limits: ProgramLimits
) -> tuple[Opinion, RunResult]:
    """Submission and interactor over crossed pipes; the run is the submission's.

    Raises LauncherDiedError.
    """
    assert job.helper is not None
    other = helper_limits(job.helper.profile, job.limits)
    # The launcher holds both to the first one's wall clock: the second needs time for its CPU time.
    pair = [replace(limits, wall_ns=max(limits.wall_ns, other.wall_ns)), other]
    files = [job.submission.file.fd, job.helper.file.fd]
    with SealedFile([test.input, test.expected]) as blob:
        middle, end = len(test.input), len(test.input) + len(test.expected)
        aux = (Span(0, middle), Span(middle, end - middle))
        answer = await launcher.run(
            list(zip(pair, files, strict=True)),
            blob.fd,
            [TestSpans(ABSENT, ABSENT, aux)],
            Compare.NEVER,
            bound_s(pair, 1),
        )
    submission, interactor = answer[0]
    return _interaction(submission, interactor, limits), submission


def _interaction(submission: RunResult, interactor: RunResult, limits: ProgramLimits) -> Opinion:
    """Who ended first tells a crash from the broken pipe after a rejection."""
    verdict, detail = classify(submission, limits)
    if verdict is Verdict.OK:
        return _opinion("interactor", interactor)
    has_crashed = submission.outcome in (Outcome.EXITED, Outcome.SIGNALED)
    if (
        verdict is Verdict.RUNTIME_ERROR
        and has_crashed
        and interactor.ended_ns <= submission.ended_ns
        and (opinion := _opinion("interactor", interactor)).verdict is not Verdict.OK
    ):
        return opinion
    return Opinion(verdict, detail)


def _opinion(who: str, run: RunResult) -> Opinion:
    """Raises LauncherDiedError where the machine was at fault."""
    if run.outcome is Outcome.EXITED and run.code == _ACCEPTED:
        return Opinion(Verdict.OK)
    if run.outcome is Outcome.EXITED and run.code == _REJECTED:
        return Opinion(Verdict.WRONG_ANSWER)
    if run.outcome in (Outcome.START_FAILED, Outcome.WALL_LIMIT, Outcome.CANCELLED) or (
        run.outcome is Outcome.SIGNALED and run.code == signal.SIGKILL
    ):
        raise LauncherDiedError(f"{who}: {run.outcome.name} {run.code}")
    exhausted = who == "interactor" and run.outcome in _EXHAUSTED
    verdict = Verdict.OUTPUT_LIMIT if exhausted else Verdict.WRONG_ANSWER
    return Opinion(verdict, f"{who} failed: {run.outcome.name} {run.code}", failed=True)


async def fault_of(
    launcher: Launcher, job: Job, test: PreparedTest, silent: Executable | None
) -> str | None:
    """Why the job's helper cannot judge anybody, or None if it can. Raises LauncherDiedError.

    `silent` is the partner of an interactor.
    """
    if job.checker.kind is CheckerKind.PROGRAM:
        opinion = await ask_checker(launcher, job, test, test.expected)
        tried_on = "the expected output"
    else:
        assert silent is not None
        alone = replace(job, submission=silent)
        limits = helper_limits(silent.profile, job.limits)
        opinion, _ = await interact(launcher, alone, test, limits)
        tried_on = "a silent submission"
    if not opinion.failed:
        return None
    return f"{opinion.detail}, tried on {tried_on}"


class Trials:
    """Which helpers have stood their trial, by problem; the least recently used go first.

    A failure is not remembered: the next submission of the problem tries again.
    """

    def __init__(self) -> None:
        self._sound: OrderedDict[str, None] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @staticmethod
    def key(problem_id: str, kind: CheckerKind, source: str) -> str:
        digest = hashlib.sha256()
        for part in (problem_id, kind.value, source):
            digest.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
        return digest.hexdigest()

    def is_sound(self, key: str) -> bool:
        """Counts as a use."""
        if key not in self._sound:
            return False
        self._sound.move_to_end(key)
        return True

    def lock(self, key: str) -> asyncio.Lock:
        """Held by whoever tries it, so that a group's completions try it once."""
        return self._locks.setdefault(key, asyncio.Lock())

    def passed(self, key: str) -> None:
        self._sound[key] = None
        while len(self._sound) > _MAX_REMEMBERED:
            self._sound.popitem(last=False)
