"""`magistral` as a user starts it: a process of its own, watched with everything that it starts."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from megatron_magistral.cluster import PR_SET_PDEATHSIG

ROOT = Path(__file__).parent.parent
MICRO = ROOT / "tests" / "micro.yaml"

TIMEOUT_S = 600.0
"""Of one run; a bound against hanging on a slow machine, not an expectation."""
SETTLE_S = 10.0
POLL_S = 0.2

_libc = ctypes.CDLL(None)

# What the command lines of the roles have in them.
ROLES = {
    "generator": "sglang.launch_server",
    "verifier": "verifier_sandbox",
    "controller": "megatron_magistral.rollout.role",
    "trainer": "megatron_magistral.trainer.role",
}


class CliRun:
    """One call of `magistral`. A context manager: leaving it kills what is left."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._log = folder / f"{arguments[0]}.out"
        self.runs = folder / "runs"
        # A run that is resumed has its folder.
        where = [] if arguments[0] == "resume" else [f"run.directory={self.runs}"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_magistral.cli", *arguments, *where],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_as_from_a_shell,
            )
        self._tree = psutil.Process(self.process.pid)
        self._seen: set[psutil.Process] = set()
        self.crowds: list[dict[str, set[int]]] = []
        """At each look: the process ids of every role."""

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def folder(self) -> Path:
        """The one run folder that was made."""
        (folder,) = self.runs.iterdir()
        return folder

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that must happen while the run goes on."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, f"ended early:\n{self.output}"
            assert time.monotonic() < deadline, f"not in time:\n{self.output}"
            self._look()
            time.sleep(POLL_S)
        self._look()

    def wait(self) -> int:
        """Wait for the end; the exit code."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"not in time:\n{self.output}"
            self._look()
            time.sleep(POLL_S)
        return self.process.returncode

    def kill(self) -> None:
        """As the kernel does it when memory is short; and what it started ends by itself."""
        self.process.kill()
        self.process.wait()
        assert self.left_running() == []

    def left_running(self) -> list[psutil.Process]:
        """Processes of the run that still exist a moment after its end."""
        _, alive = psutil.wait_procs(self._seen, timeout=SETTLE_S)
        return [process for process in alive if _runs(process)]

    def pids(self, role: str) -> set[int]:
        return self.crowds[-1].get(role, set())

    def _look(self) -> None:
        crowd: dict[str, set[int]] = {}
        try:
            processes = self._tree.children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in processes:
            self._seen.add(process)
            command = _command(process)
            for role, mark in ROLES.items():
                if mark in command:
                    crowd.setdefault(role, set()).add(process.pid)
        self.crowds.append(crowd)

    def __enter__(self) -> CliRun:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in [self._tree, *self._seen]:
            if _runs(process):
                process.kill()
        self.process.wait()


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _as_from_a_shell() -> None:
    """Listens to SIGINT, to which a shell that runs the tests in the background makes everything
    deaf, and ends with the tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
