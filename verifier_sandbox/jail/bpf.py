"""Classic BPF for seccomp: turns a table of decisions per system call into filter bytes.

A filter is loaded once per program run, and the kernel then interprets it for every system call
number to build its cache. So numbers are found by binary search, not by a chain of tests.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

# struct seccomp_data { int nr; u32 arch; u64 instruction_pointer; u64 args[6]; }
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16
_AUDIT_ARCH_X86_64 = 0xC000003E
_X32_BIT = 0x40000000

_LOAD_WORD, _AND, _RETURN, _JUMP = 0x20, 0x54, 0x06, 0x05
_JUMP_EQUAL, _JUMP_GREATER_EQUAL = 0x15, 0x35
_MAX_SHORT_JUMP = 255

# Stands for the process id of the program, which is known only after the clone. The launcher
# (and the zygote) replace it in the finished bytes; no real pid is that large.
OWN_PID = 0x7F0D1E57


class Action(IntEnum):
    """What the kernel does with a call (values of `SECCOMP_RET_*`)."""

    ALLOW = 0x7FFF0000
    KILL = 0x80000000
    EPERM = 0x00050000 | 1
    ENOSYS = 0x00050000 | 38


@dataclass(frozen=True)
class Check:
    """`args[index] & mask == value`, or `!=` if `negate`; on the low 32 bits, or 64 if `wide`."""

    index: int
    value: int
    mask: int = 0xFFFFFFFF
    negate: bool = False
    wide: bool = False

    def __post_init__(self) -> None:
        if self.wide and (self.negate or self.mask != 0xFFFFFFFF):
            raise ValueError("a wide check is for plain equality")


@dataclass(frozen=True)
class Conditional:
    """`action` if every check of one alternative holds, else `otherwise`."""

    alternatives: tuple[tuple[Check, ...], ...]
    action: Action = Action.ALLOW
    otherwise: Action = Action.EPERM


Decision = Action | Conditional
_Instruction = tuple[int, int, int, int]


def assemble(decisions: Mapping[int, Decision], default: Action) -> bytes:
    """Returns `struct sock_filter[]` for x86-64; a foreign architecture or the x32 ABI is killed.

    Raises ValueError if the filter is longer than the kernel's limit of 4096 instructions.
    """
    code = _Code()
    start = code.search(_ranges(decisions, default))
    start = code.branch(_JUMP_EQUAL, _AUDIT_ARCH_X86_64, code.load(_OFFSET_NR, start), Action.KILL)
    code.load(_OFFSET_ARCH, start)
    program = code.finish()
    if len(program) > 4096:
        raise ValueError(f"seccomp filter has {len(program)} instructions; the kernel takes 4096")
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _ranges(decisions: Mapping[int, Decision], default: Action) -> list[tuple[int, Decision]]:
    """Sorted (first number, decision) of runs of numbers that share a decision."""
    ranges: list[tuple[int, Decision]] = []

    def append(first: int, decision: Decision) -> None:
        if not ranges or ranges[-1][1] != decision:
            ranges.append((first, decision))

    next_number = 0
    for number, decision in sorted(decisions.items()):
        if number > next_number:
            append(next_number, default)
        append(number, decision)
        next_number = number + 1
    append(next_number, default)
    append(_X32_BIT, Action.KILL)
    return ranges


class _Code:
    """Writes a program from its end to its beginning, because BPF jumps only forward.

    A place is the distance of an instruction from the end. What is written last runs first, so
    every target of a jump is known when the jump is written, and results are shared by all.
    """

    def __init__(self) -> None:
        self._backward: list[_Instruction] = []
        self._results: dict[Action, int] = {}

    def finish(self) -> list[_Instruction]:
        return self._backward[::-1]

    def _write(self, operation: int, if_true: int, if_false: int, operand: int) -> int:
        self._backward.append((operation, if_true, if_false, operand))
        return len(self._backward) - 1

    def _skip(self, target: int) -> int:
        """How many instructions the next one must jump over to reach the target."""
        return len(self._backward) - 1 - target

    def result(self, action: Action) -> int:
        """The place of a return of this action, within reach."""
        place = self._results.get(action)
        if place is None or self._skip(place) > _MAX_SHORT_JUMP - 4:
            place = self._results[action] = self._write(_RETURN, 0, 0, action)
        return place

    def load(self, offset: int, then: int) -> int:
        if self._skip(then):
            self._write(_JUMP, 0, 0, self._skip(then))
        return self._write(_LOAD_WORD, 0, 0, offset)

    def branch(self, test: int, operand: int, if_true: int, if_false: int | Action) -> int:
        """Jumps by a comparison of the accumulator."""
        if isinstance(if_false, Action):
            if_false = self.result(if_false)
        targets = [if_true, if_false]
        for i, target in enumerate(targets):
            if self._skip(target) > _MAX_SHORT_JUMP - 1:
                targets[i] = self._write(_JUMP, 0, 0, self._skip(target))
        return self._write(test, self._skip(targets[0]), self._skip(targets[1]), operand)

    def search(self, ranges: Sequence[tuple[int, Decision]]) -> int:
        """Finds the range of the accumulator, a system call's number."""
        if len(ranges) == 1:
            return self._decide(ranges[0][1])
        middle = len(ranges) // 2
        right = self.search(ranges[middle:])
        left = self.search(ranges[:middle])
        return self.branch(_JUMP_GREATER_EQUAL, ranges[middle][0], right, left)

    def _decide(self, decision: Decision) -> int:
        if isinstance(decision, Action):
            return self.result(decision)
        place = self.result(decision.otherwise)
        for checks in reversed(decision.alternatives):
            failed, place = place, self.result(decision.action)
            for check in reversed(checks):
                place = self._compare(check, place, failed)
        return place

    def _compare(self, check: Check, passed: int, failed: int) -> int:
        offset = _OFFSET_ARGS + 8 * check.index
        if check.wide:
            high = self.branch(_JUMP_EQUAL, check.value >> 32, passed, failed)
            passed = self.load(offset + 4, high)
        if check.negate:
            passed, failed = failed, passed
        place = self.branch(_JUMP_EQUAL, check.value & 0xFFFFFFFF, passed, failed)
        if check.mask != 0xFFFFFFFF:
            place = self._write(_AND, 0, 0, check.mask)
        return self.load(offset, place)


def own_pid_offsets(program: bytes) -> list[int]:
    """Byte offsets of the operands that hold `OWN_PID`."""
    marker = struct.pack("<I", OWN_PID)
    return [at for at in range(4, len(program), 8) if program[at : at + 4] == marker]


def with_own_pid(program: bytes, pid: int) -> bytes:
    """`program` with `OWN_PID` replaced by `pid`."""
    patched = bytearray(program)
    for at in own_pid_offsets(program):
        patched[at : at + 4] = struct.pack("<I", pid)
    return bytes(patched)
