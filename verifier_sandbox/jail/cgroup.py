"""A memory cgroup per slot, where one can be made: the last bound on what a slot holds at once.

Verdicts come from the program's own resident memory; this only protects the node, from compilers
and from what no process owns (pages of files in memory). Versions 1 and 2.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

# Above what a compiler (1.5 GiB of address space) and a program's files can come to.
_LIMIT_BYTES = 2 << 30
_PREFIX = "verifier-slot"
_REMOVE_PATIENCE_S = 2.0


class SlotCgroup:
    """A child of our own cgroup, with a memory limit. Made by `create`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def create(cls, name: str) -> SlotCgroup | None:
        """None where this process may not make one: read-only, not delegated, or no controller."""
        for parent, limit_file in _parents():
            path = parent / f"{_PREFIX}-{os.getpid()}-{name}"
            try:
                if limit_file == "memory.max":
                    (parent / "cgroup.subtree_control").write_text("+memory")
                _remove_stale(parent)
                path.mkdir(exist_ok=True)
                (path / limit_file).write_text(str(_LIMIT_BYTES))
            except OSError:
                with contextlib.suppress(OSError):
                    path.rmdir()
                continue
            return cls(path)
        return None

    def add(self, pid: int) -> None:
        """Moves a process in; its future children follow. Raises OSError."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Removes the group once its last process is gone."""
        end = time.monotonic() + _REMOVE_PATIENCE_S
        while time.monotonic() < end:
            try:
                self._path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:  # the last process is still being reaped
                time.sleep(0.01)


def is_available() -> bool:
    """Whether slots get a memory cgroup here."""
    group = SlotCgroup.create("probe")
    if group is None:
        return False
    group.remove()
    return True


def _parents() -> list[tuple[Path, str]]:
    """Our own cgroup's directory and the name of its limit file, for each version mounted."""
    own = {}
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    found = []
    for line in _lines("/proc/self/mounts"):
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            names = next((name for name in own if "memory" in name.split(",")), None)
            if names is not None:
                found.append((Path(mount + own[names]), "memory.limit_in_bytes"))
        if kind == "cgroup2" and "" in own:
            found.append((Path(mount + own[""]), "memory.max"))
    return found


def _remove_stale(parent: Path) -> None:
    """Groups of services that were killed."""
    for path in parent.glob(f"{_PREFIX}-*"):
        pid = path.name.removeprefix(f"{_PREFIX}-").split("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                path.rmdir()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
