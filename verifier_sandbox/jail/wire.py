"""The layout of `wire.h` in Python."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

MAX_TESTS = 256
_ABSENT = (1 << 64) - 1
_REQUEST = struct.Struct("<6I")
_PROGRAM = struct.Struct("<2I5Q")
_SPAN = struct.Struct("<2Q")
_RESULT = struct.Struct("<IiII6Q")
_REPLY = struct.Struct("<2I")


class Operation(IntEnum):
    RUN = 1
    COMPILE = 2


class Profile(IntEnum):
    """Which filter and Landlock rules a program runs under."""

    CPP_STATIC = 0
    CPP_DYNAMIC = 1
    PYTHON = 2
    COMPILER = 3


class Compare(IntEnum):
    """How the launcher compares output by itself; at the first difference it asks us."""

    NEVER = 0
    EXACT = 1
    TRIMMED = 2


class Outcome(IntEnum):
    """How a program ended."""

    EXITED = 1
    SIGNALED = 2
    CPU_LIMIT = 3
    IDLE_LIMIT = 4
    MEMORY_LIMIT = 5
    OUTPUT_LIMIT = 6
    WALL_LIMIT = 7
    START_FAILED = 8
    CANCELLED = 9
    THREAD_LIMIT = 10
    EXEC_FAILED = 11


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program; `wall_ns` is reached only where the machine gives it no core."""

    profile: Profile
    cpu_ns: int
    idle_ns: int
    wall_ns: int
    memory_bytes: int
    output_bytes: int
    under_pressure: bool = False

    def pack(self) -> bytes:
        return _PROGRAM.pack(
            self.profile,
            self.under_pressure,
            *(self.cpu_ns, self.idle_ns, self.wall_ns, self.memory_bytes, self.output_bytes),
        )


@dataclass(frozen=True)
class Span:
    """A piece of the blob."""

    offset: int
    length: int

    def pack(self) -> bytes:
        return _SPAN.pack(self.offset, self.length)


ABSENT = Span(_ABSENT, 0)


@dataclass(frozen=True)
class TestSpans:
    """What one test feeds: standard input, expected output, descriptors 3 and 4."""

    __test__ = False  # not for pytest

    input: Span = ABSENT
    expected: Span = ABSENT
    aux: tuple[Span, Span] = (ABSENT, ABSENT)

    def pack(self) -> bytes:
        return b"".join(span.pack() for span in (self.input, self.expected, *self.aux))


@dataclass(frozen=True)
class RunResult:
    """How one program of one test ended, and what it used."""

    outcome: Outcome
    code: int
    stage: int
    matched: bool
    cpu_ns: int
    wall_ns: int
    wait_ns: int
    peak_bytes: int
    output_bytes: int
    ended_ns: int


def pack_run(
    programs: Sequence[ProgramLimits], tests: Sequence[TestSpans], compare: Compare
) -> bytes:
    head = _REQUEST.pack(Operation.RUN, len(programs), len(tests), compare, 0, 0)
    return head + _pack_programs(programs) + b"".join(test.pack() for test in tests)


def pack_compile(
    limits: ProgramLimits, arguments: Sequence[str], environment: Sequence[str]
) -> bytes:
    head = _REQUEST.pack(Operation.COMPILE, 1, 0, 0, len(arguments), len(environment))
    strings = b"".join(text.encode() + b"\0" for text in (*arguments, *environment))
    return head + _pack_programs([limits]) + strings


def _pack_programs(programs: Sequence[ProgramLimits]) -> bytes:
    return b"".join(program.pack() for program in programs).ljust(2 * _PROGRAM.size, b"\0")


def unpack_reply(reply: bytes) -> list[list[RunResult]]:
    """Results per test, per program; fewer tests than asked where the launcher stopped."""
    num_results, num_programs = _REPLY.unpack_from(reply)
    results = [
        RunResult(Outcome(outcome), code, stage, bool(matched), *numbers)
        for outcome, code, stage, matched, *numbers in _RESULT.iter_unpack(reply[_REPLY.size :])
    ]
    return [
        results[at : at + num_programs] for at in range(0, num_results * num_programs, num_programs)
    ]
