"""What is to be run: a submission, its tests, and the limits under which the launcher runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verifier_sandbox.jail.files import SealedFile
from verifier_sandbox.jail.wire import Profile, ProgramLimits
from verifier_sandbox.protocol import Checker, Limits

NS, MIB = 1_000_000_000, 1 << 20
_WALL_FACTOR = 30  # a machine that gives a program less than a thirtieth of a core is at fault
_ANSWER_GRACE_S = 30.0
# A checker reads whatever a submission wrote: what was enough for the one is not for the other.
_HELPER_CPU_FACTOR, _HELPER_CPU_S = 2, 1.0
_HELPER_MEMORY_MIB = 1024


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


def program_limits(profile: Profile, limits: Limits, under_pressure: bool) -> ProgramLimits:
    """A request's limits as the launcher takes them."""
    cpu_ns = int(limits.cpu_s * NS)
    return ProgramLimits(
        profile,
        cpu_ns=cpu_ns,
        idle_ns=cpu_ns,
        wall_ns=_WALL_FACTOR * cpu_ns,
        memory_bytes=limits.memory_mib * MIB,
        output_bytes=limits.output_mib * MIB,
        under_pressure=under_pressure,
    )


def helper_limits(profile: Profile, limits: Limits) -> ProgramLimits:
    """More than a submission has, so that no honest output exhausts its checker."""
    more = {
        "cpu_s": _HELPER_CPU_FACTOR * limits.cpu_s + _HELPER_CPU_S,
        "memory_mib": max(limits.memory_mib, _HELPER_MEMORY_MIB),
    }
    return program_limits(profile, limits.model_copy(update=more), under_pressure=False)


def bound_s(programs: Sequence[ProgramLimits], num_tests: int) -> float:
    """Longer than the launcher can take if it works."""
    return num_tests * max(p.wall_ns + p.idle_ns for p in programs) / NS + _ANSWER_GRACE_S
