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
    ranges = _ranges(decisions, default)
    program: list[_Instruction] = [
        (_LOAD_WORD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH_X86_64),
        (_RETURN, 0, 0, Action.KILL),
        (_LOAD_WORD, 0, 0, _OFFSET_NR),
        *_search(ranges),
    ]
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


def _search(ranges: Sequence[tuple[int, Decision]]) -> list[_Instruction]:
    if len(ranges) == 1:
        return _leaf(ranges[0][1])
    middle = len(ranges) // 2
    left, right = _search(ranges[:middle]), _search(ranges[middle:])
    pivot = ranges[middle][0]
    if len(left) <= _MAX_SHORT_JUMP:
        return [(_JUMP_GREATER_EQUAL, len(left), 0, pivot), *left, *right]
    return [(_JUMP_GREATER_EQUAL, 0, 1, pivot), (_JUMP, 0, 0, len(left)), *left, *right]


def _leaf(decision: Decision) -> list[_Instruction]:
    if isinstance(decision, Action):
        return [(_RETURN, 0, 0, decision)]
    code: list[_Instruction] = []
    for checks in decision.alternatives:
        code += _alternative(checks, decision.action)
    return [*code, (_RETURN, 0, 0, decision.otherwise)]


def _alternative(checks: Sequence[Check], action: Action) -> list[_Instruction]:
    """Falls through to the next alternative as soon as one check fails."""
    code: list[_Instruction] = [(_RETURN, 0, 0, action)]
    for check in reversed(checks):
        code = _compare(check, len(code)) + code
    return code


def _compare(check: Check, skip: int) -> list[_Instruction]:
    offset = _OFFSET_ARGS + 8 * check.index
    code: list[_Instruction] = [(_LOAD_WORD, 0, 0, offset)]
    if check.mask != 0xFFFFFFFF:
        code.append((_AND, 0, 0, check.mask))
    on_equal, on_other = (skip, 0) if check.negate else (0, skip)
    if not check.wide:
        return [*code, (_JUMP_EQUAL, on_equal, on_other, check.value & 0xFFFFFFFF)]
    high = [(_LOAD_WORD, 0, 0, offset + 4), (_JUMP_EQUAL, 0, skip, check.value >> 32)]
    return [*code, (_JUMP_EQUAL, 0, skip + len(high), check.value & 0xFFFFFFFF), *high]


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
