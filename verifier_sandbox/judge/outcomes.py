"""What the end of one run says about its program."""

from __future__ import annotations

import os
import signal

from verifier_sandbox.jail.launcher import LauncherDiedError
from verifier_sandbox.jail.wire import Outcome, ProgramLimits, RunResult
from verifier_sandbox.protocol import Verdict

_LIMITS = {
    Outcome.CPU_LIMIT: Verdict.TIME_LIMIT,
    Outcome.IDLE_LIMIT: Verdict.TIME_LIMIT,
    Outcome.MEMORY_LIMIT: Verdict.MEMORY_LIMIT,
    Outcome.OUTPUT_LIMIT: Verdict.OUTPUT_LIMIT,
    Outcome.THREAD_LIMIT: Verdict.RUNTIME_ERROR,
    Outcome.EXEC_FAILED: Verdict.RUNTIME_ERROR,
}


def classify(run: RunResult, limits: ProgramLimits) -> tuple[Verdict, str]:
    """The verdict so far (OK: it ended well, its output is still to be compared) and a detail.

    Raises LauncherDiedError for an end that says nothing about the program.
    """
    if run.outcome is Outcome.EXITED:
        if run.code == 0:
            return Verdict.OK, ""
        return Verdict.RUNTIME_ERROR, f"exit status {run.code}"
    if run.outcome is Outcome.SIGNALED or _only_pretends(run, limits):
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


def in_doubt(run: RunResult, limits: ProgramLimits) -> bool:
    """Whether a quieter machine might have said otherwise.

    Under pressure the launcher lets a program run to 1.5 times its limit. Killed there, it is too
    slow on any machine; ended by itself, it may have been slowed down.
    """
    if run.outcome is Outcome.IDLE_LIMIT:
        return run.wait_ns > run.wall_ns // 5
    killed = run.code == signal.SIGKILL
    return run.outcome is Outcome.CPU_LIMIT and not killed and not _only_pretends(run, limits)


def _only_pretends(run: RunResult, limits: ProgramLimits) -> bool:
    """A program that sends itself the signal of a time limit, with time left."""
    is_signal = run.outcome is Outcome.CPU_LIMIT and run.code == signal.SIGXCPU
    return is_signal and run.cpu_ns <= limits.cpu_ns


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
