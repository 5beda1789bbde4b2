"""Starts the processes of a run on this machine, watches them, and ends them all.

Each role is a process of its own in a process group of its own, with a log file. The first role
that ends with an error ends the run: it is named, with the end of its log. Whatever happens to this
process, they end too: the kernel sends them SIGTERM when it dies, and a warden ends what they
started themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

PR_SET_PDEATHSIG = 1
LOG_TAIL_LINES = 30

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Role:
    """One process to start."""

    name: str
    command: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """The whole environment of the process."""


class RoleFailed(RuntimeError):
    """A role ended although the run still needed it."""

    def __init__(self, role: Role, returncode: int, after_s: float) -> None:
        how = (
            f"was killed by {signal.Signals(-returncode).name}"
            if returncode < 0
            else f"ended with exit code {returncode}"
        )
        super().__init__(
            f"{role.name} {how} after {after_s:.0f} s; the end of {role.log}:\n{tail(role.log)}"
        )
        self.role = role


class StageTimeout(RuntimeError):
    """A wait of the supervisor reached its bound."""


@dataclass(frozen=True)
class _Running:
    role: Role
    process: subprocess.Popen[bytes]
    since: float


class Supervisor:
    """The processes of one run. A context manager: leaving it ends every process."""

    def __init__(self, *, grace_s: float = 20.0) -> None:
        self._grace_s = grace_s
        self._running: dict[str, _Running] = {}
        self._warden = subprocess.Popen(
            python_module("megatron_magistral.warden"),
            stdin=subprocess.PIPE,
            text=True,
            bufsize=1,
            process_group=0,
        )

    def start(self, role: Role) -> None:
        role.log.parent.mkdir(parents=True, exist_ok=True)
        with role.log.open("ab") as log:
            process = subprocess.Popen(
                role.command,
                env=dict(role.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=_end_with_parent,
            )
        self._tell_warden("watch", process.pid)
        self._running[role.name] = _Running(role, process, time.monotonic())

    def wait_for(
        self,
        names: Iterable[str],
        *,
        tick: Callable[[], None] = lambda: None,
        tick_s: float = 0.25,
        timeout_s: float | None = None,
    ) -> None:
        """Wait until the named roles have ended well; call `tick` meanwhile.

        Raises RoleFailed when any role fails, or one that is not waited for ends at all, and
        StageTimeout at `timeout_s`.
        """
        awaited = set(names)
        begin = time.monotonic()
        while True:
            for name, running in list(self._running.items()):
                returncode = running.process.poll()
                if returncode is None:
                    continue
                if returncode != 0 or name not in awaited:
                    after_s = time.monotonic() - running.since
                    raise RoleFailed(running.role, returncode, after_s)
                del self._running[name]
                self._tell_warden("forget", running.process.pid)
            tick()
            pending = awaited & self._running.keys()
            if not pending:
                return
            if timeout_s is not None and time.monotonic() - begin > timeout_s:
                raise StageTimeout(f"{', '.join(sorted(pending))} not done after {timeout_s:.0f} s")
            time.sleep(tick_s)

    def stop_all(self) -> None:
        """SIGTERM to every process group, then SIGKILL to what is left after the grace time."""
        processes = [running.process for running in self._running.values()]
        for process in processes:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal_group(process, signal.SIGKILL)
            process.wait()
            self._tell_warden("forget", process.pid)
        self._running.clear()

    def close(self) -> None:
        """End every process, the warden last."""
        self.stop_all()
        assert self._warden.stdin is not None
        self._warden.stdin.close()
        self._warden.wait()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _tell_warden(self, word: str, group: int) -> None:
        assert self._warden.stdin is not None
        self._warden.stdin.write(f"{word} {group}\n")


def tail(path: Path, num_lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, or a word on why there are none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return "(no log)"
    return "\n".join(lines[-num_lines:]) or "(the log is empty)"


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports of the loopback interface that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def python_module(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-u", "-m", module, *arguments)


def trainer_roles(
    command: Sequence[str], world_size: int, log: Callable[[str], Path], *, port: int
) -> list[Role]:
    """One role a rank, with the variables that `torchrun` and our `srun` scripts set too."""
    roles = []
    for rank in range(world_size):
        name = f"trainer-{rank}"
        environment = dict(os.environ) | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # Ranks share the cores; more threads than cores only slow each other down.
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world_size)),
        }
        roles.append(Role(name, tuple(command), log(name), environment))
    return roles


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
