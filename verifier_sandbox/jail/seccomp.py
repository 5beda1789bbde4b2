"""Puts a seccomp filter on the current process, and tells whether this kernel can."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

from verifier_sandbox.jail.bpf import with_own_pid
from verifier_sandbox.jail.policies import PYTHON, Policy
from verifier_sandbox.jail.syscalls import SYSCALLS

_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
_ALL_THREADS, _ALLOW_SPECULATION = 1, 4
_RET_KILL_PROCESS = 0x80000000


class SeccompUnavailableError(RuntimeError):
    """This kernel, architecture or container does not let a process filter its system calls."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def is_available() -> bool:
    """Whether filters that kill the process can be installed here (x86-64 Linux with seccomp)."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    action = ctypes.c_uint32(_RET_KILL_PROCESS)
    return _seccomp(_GET_ACTION_AVAIL, 0, ctypes.byref(action)) == 0


def install(policy: Policy = PYTHON) -> None:
    """Confines the current process, all its threads and their descendants, for ever.

    Import what the process needs and open its pipes first. The default policy leaves computing
    and reading files, and denies new processes, sockets, signals to others and writable files'
    creation only as far as the file modes do: add Landlock where that matters.

    Raises SeccompUnavailableError if the kernel refuses.
    """
    if not is_available():
        raise SeccompUnavailableError(
            "seccomp filters need Linux on x86-64 with CONFIG_SECCOMP_FILTER"
        )
    code = with_own_pid(policy.filter_bytes(), os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise SeccompUnavailableError(f"no_new_privs: {os.strerror(ctypes.get_errno())}")
    result = _seccomp(_SET_MODE_FILTER, _ALL_THREADS | _ALLOW_SPECULATION, ctypes.byref(program))
    if result != 0:
        reason = os.strerror(ctypes.get_errno()) if result < 0 else f"thread {result} diverged"
        raise SeccompUnavailableError(f"seccomp filter {policy.name!r}: {reason}")


def _seccomp(operation: int, flags: int, argument: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(SYSCALLS["seccomp"], operation, flags, argument)
    if result < 0 and ctypes.get_errno() == errno.ENOSYS:
        return -1
    return int(result)
