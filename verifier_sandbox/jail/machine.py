"""What this machine offers for isolation, and the tier that follows.

The baseline needs no privilege: no_new_privs, seccomp, Landlock, rlimits, the process's CPU clock
and a watch on resident memory. An identity per slot comes on top where CAP_SETUID allows it, a
memory cgroup where one is writable.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from verifier_sandbox.jail import cgroup, landlock, seccomp

INTERPRETER_VARIABLE = "VERIFIER_PYTHON"
_MIN_PYTHON = (3, 9)
_DESCRIBE = """
import ctypes, decimal, json, random, sys, sysconfig
maps = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "/" in line}
print(json.dumps({"executable": sys.executable, "version": list(sys.version_info[:3]),
    "paths": sys.path + [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "platlib")],
    "libraries": sorted(maps)}))
"""


class Tier(StrEnum):
    """How much isolation there is, strongest first."""

    FULL = "seccomp + Landlock + an identity per slot"
    UNPRIVILEGED = "seccomp + Landlock"
    STATIC_ONLY = "seccomp + an identity per slot: static C++ that can open nothing, no Python"


class IsolationError(RuntimeError):
    """This machine cannot confine hostile code; the service does not start."""


@dataclass(frozen=True)
class Interpreter:
    """A Python that submissions run on, and what it must be able to read."""

    executable: Path
    version: tuple[int, ...]
    readable: tuple[Path, ...]


@dataclass(frozen=True)
class Machine:
    """The result of `probe()`."""

    tier: Tier
    landlock_version: int
    slot_uid_base: int | None
    """First of the slots' user ids; None where identities cannot be changed."""
    has_memory_cgroup: bool = False

    @property
    def runs_python(self) -> bool:
        return self.tier in (Tier.FULL, Tier.UNPRIVILEGED)


def probe(use_slot_uids: bool = True) -> Machine:
    """Looks at the kernel and at our privileges.

    Raises IsolationError below the weakest safe tier: no seccomp filters, not x86-64 Linux, or
    neither Landlock nor an identity per slot.
    """
    if not seccomp.is_available():
        raise IsolationError(
            "seccomp filters are not available (needs Linux on x86-64 with CONFIG_SECCOMP_FILTER "
            "and a container runtime that does not block seccomp(2)); refusing to run hostile code"
        )
    landlock_version = landlock.version()
    uid_base = _slot_uid_base() if use_slot_uids else None
    if landlock_version == 0 and uid_base is None:
        raise IsolationError(
            "neither Landlock (Linux 5.13) nor a user id of each slot's own (CAP_SETUID): the "
            "compiler could read other submissions' tests; refusing to run hostile code"
        )
    if landlock_version == 0:
        tier = Tier.STATIC_ONLY
    else:
        tier = Tier.UNPRIVILEGED if uid_base is None else Tier.FULL
    return Machine(tier, landlock_version, uid_base, cgroup.is_available())


def _slot_uid_base() -> int | None:
    """Ids that no account has on common systems; by pid, so that services do not share them."""
    base = 50_000 + os.getpid() % 80 * 128
    try:
        process = subprocess.Popen(
            ["/bin/sleep", "10"], user=base, group=base, extra_groups=[], cwd="/"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    try:
        process.kill()
    except PermissionError:  # CAP_SETUID without CAP_KILL: we could not stop what we start
        return None
    finally:
        process.wait(timeout=30)
    return base


def interpreters() -> Iterator[Interpreter]:
    """Candidates in order: $VERIFIER_PYTHON alone if set, else the system's, else our own.

    Whether the jail can read one shows only when a zygote starts from it: a virtual environment's
    base interpreter may lie in a home directory that a slot's user cannot enter.
    """
    named = os.environ.get(INTERPRETER_VARIABLE)
    own = getattr(sys, "_base_executable", sys.executable)
    candidates = [named] if named else ["/usr/bin/python3", "/usr/local/bin/python3", own]
    seen = set()
    for candidate in candidates:
        path = shutil.which(candidate)
        if path is None or os.path.realpath(path) in seen:
            continue
        seen.add(os.path.realpath(path))
        interpreter = _describe(path)
        if interpreter and interpreter.version >= _MIN_PYTHON:
            yield interpreter


def _describe(path: str) -> Interpreter | None:
    try:
        answer = subprocess.run(
            [path, "-s", "-c", _DESCRIBE], capture_output=True, timeout=60, check=True, cwd="/"
        )
        facts = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    executable = Path(facts["executable"]).resolve()
    readable = {Path(entry) for entry in facts["paths"] if entry and os.path.exists(entry)}
    readable |= {Path(library).parent for library in facts["libraries"]} - {executable.parent}
    readable |= {executable, Path("/etc/ld.so.cache"), Path("/usr/share/zoneinfo")}
    return Interpreter(executable, tuple(facts["version"]), tuple(sorted(readable)))
