"""The code judge of one node without its wire: the jail, the slots and the judge on them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from verifier_sandbox.jail.files import SealedFile
from verifier_sandbox.jail.launcher import Jail, Launcher, LauncherDiedError, prepare
from verifier_sandbox.jail.machine import Interpreter, IsolationError, Machine, interpreters, probe
from verifier_sandbox.jail.wire import Compare, Outcome, Profile, ProgramLimits, Span, TestSpans
from verifier_sandbox.judge.judge import Judge
from verifier_sandbox.pool import SlotPool

log = logging.getLogger(__name__)

_PROBE_LIMITS = ProgramLimits(
    Profile.PYTHON, 20 * 10**9, 20 * 10**9, 60 * 10**9, 300 << 20, 1 << 20
)


@dataclass(frozen=True)
class Service:
    """What a running node judges with."""

    jail: Jail
    pool: SlotPool
    judge: Judge


def default_num_slots() -> int:
    """One per core that we may use."""
    return len(os.sched_getaffinity(0))


@asynccontextmanager
async def running(
    num_slots: int | None = None, max_queue: int | None = None, use_slot_uids: bool = True
) -> AsyncIterator[Service]:
    """Starts the launchers and ends them, with all that they run, on the way out.

    Raises IsolationError where hostile code cannot be confined, BuildError without a compiler,
    ValueError for less than one slot.
    """
    jail = await prepare_jail(use_slot_uids)
    pool = SlotPool(jail, default_num_slots() if num_slots is None else num_slots, max_queue)
    try:
        pool.start()
        yield Service(jail, pool, Judge(jail, pool))
    finally:
        pool.close()


async def prepare_jail(use_slot_uids: bool = True) -> Jail:
    """Probes the machine, builds the launcher and finds an interpreter that the jail can run."""
    machine = await asyncio.to_thread(probe, use_slot_uids)
    jail = await asyncio.to_thread(prepare, machine, None)
    interpreter = await _find_interpreter(jail) if machine.runs_python else None
    log.info(
        "isolation: %s; Python: %s; C++: %s, %s",
        describe(machine),
        interpreter.executable if interpreter else "none",
        *(jail.toolchain.version, "static" if jail.toolchain.is_static else "dynamic"),
    )
    return Jail(machine, jail.launcher, jail.toolchain, interpreter)


async def _find_interpreter(jail: Jail) -> Interpreter:
    """The first candidate that runs in the jail. Raises IsolationError if none does."""
    tried = []
    for interpreter in await asyncio.to_thread(lambda: list(interpreters())):
        reason = await _try_interpreter(jail, interpreter)
        if reason is None:
            return interpreter
        tried.append(f"{interpreter.executable}: {reason}")
    raise IsolationError(
        "no Python interpreter (3.9 or later) runs in the jail; install the system's python3 or "
        f"name one that every user can read in VERIFIER_PYTHON; tried: {'; '.join(tried) or 'none'}"
    )


async def _try_interpreter(jail: Jail, interpreter: Interpreter) -> str | None:
    launcher = Launcher.start(Jail(jail.machine, jail.launcher, jail.toolchain, interpreter), 0)
    try:
        with SealedFile([b"print(6 * 7)"]) as source, SealedFile([b"42"]) as blob:
            test = TestSpans(Span(0, 0), Span(0, 2))
            programs = [(_PROBE_LIMITS, source.fd)]
            answer = await launcher.run(programs, blob.fd, [test], Compare.TRIMMED, bound_s=90)
    except LauncherDiedError as error:
        return str(error)
    finally:
        launcher.close()
    run = answer[0][0]
    if run.outcome is Outcome.EXITED and run.matched:
        return None
    return f"{run.outcome.name} {os.strerror(run.code)}"


def describe(machine: Machine) -> str:
    """One line for people."""
    cgroup = "a memory cgroup per slot" if machine.has_memory_cgroup else "no memory cgroup"
    facts = f"Landlock {machine.landlock_version}, {cgroup}"
    return f"{machine.tier.name}: {machine.tier.value} ({facts})"
