"""Starts the processes of a run on this machine, watches them, and ends them all.

Each role is a process of its own in a process group of its own, with a log file. A role that ends
is started anew as often as its policy allows. One that ends for good ends the run, unless another
does the same work: it is named, with the end of its log. Whatever happens to this process, they end
too: the kernel sends them SIGTERM when it dies, and a warden ends what they started themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from megatron_magistral.restart_requests import RestartRequest, RestartRequests

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
LOG_TAIL_LINES = 30
LOOPBACK = "127.0.0.1"
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_FIRST_EPHEMERAL = 32768
FIRST_PORT = 12000
MIN_CHOICE = 1000
# From these SGLang takes ports for its own ranks, while a process of ours may still be starting.
SGLANG_PORTS = range(22000, 30000)
# Makes torch ask the kernel for huge pages under large tensors on a CPU, if set before the first
# one. What is sent from or received into pages of 4 KiB takes up to twice as long over gloo.
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class RestartPolicy:
    """How often a role that has ended is started anew, and how long after its end.

    The pause of `backoff_s` doubles with every restart. Roles of one `pool` do the same work: the
    run goes on without those that have ended for good while one of them is left.
    """

    max_restarts: int = 0
    backoff_s: float = 1.0
    pool: str = ""

    def pause_s(self, num_restarts: int) -> float:
        """The pause before the next restart, after so many."""
        return self.backoff_s * 2.0**num_restarts


@dataclass(frozen=True)
class Role:
    """One process to start."""

    name: str
    command: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """The whole environment of the process."""
    restarts: RestartPolicy = RestartPolicy()
    address: str = ""
    """host:port that it serves, if others may ask for its restart (see restart_requests.py)."""


class RoleFailed(RuntimeError):
    """A role ended although the run still needed it."""

    def __init__(
        self, role: Role, how: str, num_restarts: int, returncode: int | None = None
    ) -> None:
        again = f", after {num_restarts} restarts" if num_restarts else ""
        super().__init__(f"{role.name} {how}{again}; the end of {role.log}:\n{tail(role.log)}")
        self.role = role
        self.returncode = returncode
        """As `Popen.poll` says it, if the role ended by itself."""


class StageTimeout(RuntimeError):
    """A wait of the supervisor reached its bound."""


@dataclass(frozen=True)
class _Running:
    role: Role
    process: subprocess.Popen[bytes]
    since: float
    since_unix: float


@dataclass(frozen=True)
class _Due:
    """A role that is to be started anew at `at` (monotonic seconds)."""

    role: Role
    at: float


class Supervisor:
    """The processes of one run. A context manager: leaving it ends every process.

    `requests` are those of other processes to restart one that hangs; `say` takes a line about each
    restart.
    """

    def __init__(
        self,
        *,
        grace_s: float = 20.0,
        requests: RestartRequests | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self._grace_s = grace_s
        self._requests = requests
        self._say = say
        self._running: dict[str, _Running] = {}
        self._due: dict[str, _Due] = {}
        self.num_restarts: Counter[str] = Counter()
        """By the name of the role."""
        self._warden = subprocess.Popen(
            python_module("megatron_magistral.warden"),
            stdin=subprocess.PIPE,
            text=True,
            bufsize=1,
            process_group=0,
        )

    @property
    def running(self) -> list[str]:
        """Names of the roles that have not ended."""
        return list(self._running)

    def start(self, role: Role) -> None:
        role.log.parent.mkdir(parents=True, exist_ok=True)
        with role.log.open("ab") as output:
            process = subprocess.Popen(
                role.command,
                env=dict(role.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=_end_with_parent,
            )
        self._tell_warden("watch", process.pid)
        self._running[role.name] = _Running(role, process, time.monotonic(), time.time())

    def wait_for(
        self,
        names: Iterable[str],
        *,
        tick: Callable[[], None] = lambda: None,
        tick_s: float = 0.25,
        timeout_s: float | None = None,
    ) -> None:
        """Wait until the named roles have ended well; call `tick` meanwhile.

        A role that fails, or that is not waited for and ends at all, is started anew where its
        policy allows. Raises RoleFailed where it does not, and StageTimeout at `timeout_s`.
        """
        awaited = set(names)
        begin = time.monotonic()
        while True:
            self._look(awaited)
            tick()
            pending = awaited & (self._running.keys() | self._due.keys())
            if not pending:
                return
            if timeout_s is not None and time.monotonic() - begin > timeout_s:
                raise StageTimeout(f"{', '.join(sorted(pending))} not done after {timeout_s:.0f} s")
            time.sleep(tick_s)

    def _look(self, awaited: Set[str]) -> None:
        """See which roles have ended or are to be restarted, and do what follows from it."""
        for name, running in list(self._running.items()):
            returncode = running.process.poll()
            if returncode == 0 and name in awaited:
                self._forget(running)
            elif returncode is not None:
                self._replace(running, describe_end(returncode))
            elif request := self._request_about(running):
                self._replace(running, f"was asked to be restarted, as it {request.why},")
        for name, due in list(self._due.items()):
            if time.monotonic() >= due.at:
                del self._due[name]
                self.start(due.role)

    def _request_about(self, running: _Running) -> RestartRequest | None:
        """A request to restart this very process."""
        if self._requests is None or not running.role.address:
            return None
        request = self._requests.take(running.role.address)
        if request is None or request.silent_since < running.since_unix:
            return None  # it is about a process before this one
        return request

    def _replace(self, running: _Running, how: str) -> None:
        """End what is left of a role, and have it started anew, or do without it.

        Raises RoleFailed if neither is possible.
        """
        role, name = running.role, running.role.name
        how += f" after {time.monotonic() - running.since:.0f} s"
        num_restarts = self.num_restarts[name]
        if num_restarts < role.restarts.max_restarts:
            pause_s = role.restarts.pause_s(num_restarts)
            self._due[name] = _Due(role, time.monotonic() + pause_s)
            self.num_restarts[name] += 1
            number = f"{num_restarts + 1} of {role.restarts.max_restarts}"
            self._say(f"{name} {how}; restart {number} in {pause_s:g} s; see {role.log}")
        elif others := self._others_of_pool(role):
            self._say(f"{name} {how}; the run goes on with {', '.join(others)}; see {role.log}")
        else:
            raise RoleFailed(role, how, num_restarts, running.process.returncode)
        _signal_group(running.process, signal.SIGKILL)
        running.process.wait()
        self._forget(running)

    def _others_of_pool(self, role: Role) -> list[str]:
        """Names of other roles that do the work of `role` and have not ended for good."""
        alive = [running.role for running in self._running.values()]
        alive += [due.role for due in self._due.values()]
        pool = role.restarts.pool
        return [r.name for r in alive if pool and r.restarts.pool == pool and r.name != role.name]

    def _forget(self, running: _Running) -> None:
        del self._running[running.role.name]
        self._tell_warden("forget", running.process.pid)

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
        self._due.clear()

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


def describe_end(returncode: int) -> str:
    """How a process ended, from what `Popen.poll` says."""
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"


def tail(path: Path, num_lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, or a word on why there are none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return "(no log)"
    return "\n".join(lines[-num_lines:]) or "(the log is empty)"


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Distinct TCP ports of an address of this machine that nobody listens on now.

    They are not of the ranges from which the kernel takes ports for connections and SGLang for its
    ranks: one of these could be gone by the time that a process which is still starting listens on
    it. Raises OSError if there are not so many.
    """
    candidates = _lasting_ports()
    order = random.Random().sample(candidates, len(candidates))
    found = list(itertools.islice((port for port in order if port_is_free(port, host)), count))
    if len(found) < count:
        raise OSError(errno.EADDRNOTAVAIL, f"{host} has {len(found)} of {count} free ports")
    return found


def _lasting_ports() -> list[int]:
    try:
        first = int(EPHEMERAL_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        first = USUAL_FIRST_EPHEMERAL
    if first - FIRST_PORT < MIN_CHOICE:  # the kernel may take nearly all of them
        return list(range(FIRST_PORT, 1 << 16))
    return [port for port in range(FIRST_PORT, first) if port not in SGLANG_PORTS]


def port_is_free(port: int, host: str = LOOPBACK) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
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
        environment = (
            HUGE_PAGES
            | dict(os.environ)
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                # Ranks share the cores; more threads than cores only slow each other down.
                "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world_size)),
            }
        )
        roles.append(Role(name, tuple(command), log(name), environment))
    return roles


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
