"""Maths checks in killable worker processes, for an asyncio service.

The parent owns the deadline. It counts the CPU time of the worker, so a verdict does not depend on
how busy the machine is; a wall-clock bound stands behind it and is an infrastructure fault when
reached, not a verdict. No signals and no timers: the caller's own stay untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .result import MathResult, MathVerdict
from .worker import READY, UNCONFINED

_ROOT = str(Path(__file__).resolve().parents[2])
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from verifier_sandbox.mathcheck.worker import main; "
    "main(memory_mib=int(sys.argv[2]), with_sympy=sys.argv[3] == 'True')"
)
_LAST_WORDS_CHARS = 500
_CPUCLOCK_SCHED = 2  # clock_getcpuclockid(3): the CPU-time clock of process p is ~p << 3 | 2


@dataclass(frozen=True)
class MathLimits:
    """Bounds of one worker."""

    cpu_s: float = 2.0
    """CPU time of one job; beyond it the worker is killed and the verdict is TIMEOUT."""
    wall_s: float = 60.0
    """Wall-clock time of one job; beyond it the attempt is INTERNAL."""
    start_s: float = 120.0
    """Wall-clock time of the start of a worker."""
    memory_mib: int = 1024
    """Address space of the worker."""
    recycle_jobs: int = 2000
    """A worker is replaced after this many jobs."""
    recycle_rss_mib: int = 300
    """A worker whose resident memory has reached this is replaced."""
    with_sympy: bool = True
    """Load SymPy for references that only it can read, if it is installed (a second per start)."""


class WorkerFailed(RuntimeError):
    """A worker died, or did not start or answer within the wall-clock bound."""


class _OutOfTime(Exception):
    """The job used up its CPU time."""


class _Worker:
    """One worker process and the pipe to it. Runs one job at a time."""

    def __init__(self, process: asyncio.subprocess.Process, limits: MathLimits) -> None:
        self._process = process
        self._limits = limits
        self._num_jobs = 0
        self.rss_mib = 0.0
        self.is_confined = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, limits: MathLimits) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-B", "-c", _START, _ROOT),
            *(str(limits.memory_mib), str(limits.with_sympy)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
            limit=1 << 20,
        )
        worker = cls(process, limits)
        try:
            word, _ = await worker._receive(cpu_s=limits.start_s, wall_s=limits.start_s)
        except BaseException:  # cancellation too must not leave the process behind
            await worker.kill()
            raise
        if word not in (READY, UNCONFINED):
            await worker.kill()
            raise WorkerFailed(f"maths worker {worker.pid} said {word!r} instead of {READY!r}")
        worker.is_confined = word == READY
        return worker

    @property
    def is_worn(self) -> bool:
        return (
            self._num_jobs >= self._limits.recycle_jobs
            or self.rss_mib >= self._limits.recycle_rss_mib
        )

    async def run(self, reference: str, response_text: str) -> MathResult:
        self._num_jobs += 1
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([reference, response_text]).encode() + b"\n")
            verdict, reason = await self._receive(
                cpu_s=self._limits.cpu_s, wall_s=self._limits.wall_s
            )
        except _OutOfTime:
            return MathResult(MathVerdict.TIMEOUT, f"more than {self._limits.cpu_s} s of CPU")
        self.rss_mib = peak_rss_mib(self.pid)
        return MathResult(MathVerdict(verdict), reason)

    async def _last_words(self) -> str:
        """The end of what a dead worker wrote to its standard error."""
        assert self._process.stderr is not None
        await self.kill()
        written = await self._process.stderr.read()
        return written.decode(errors="replace").strip()[-_LAST_WORDS_CHARS:] or "no message"

    async def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _receive(self, *, cpu_s: float, wall_s: float) -> tuple[str, str]:
        """The next message. Raises _OutOfTime after `cpu_s` of CPU, WorkerFailed at the wall."""
        assert self._process.stdout is not None
        cpu_begin_s, begin = self.cpu_used_s(), time.monotonic()
        read = asyncio.ensure_future(self._process.stdout.readline())
        wait_s = cpu_s
        try:
            while True:
                done, _ = await asyncio.wait({read}, timeout=wait_s)
                if done:
                    break
                wait_s = cpu_s - (self.cpu_used_s() - cpu_begin_s)
                if wait_s <= 0:
                    raise _OutOfTime
                if time.monotonic() - begin > wall_s:
                    raise WorkerFailed(f"maths worker {self.pid} did not answer within {wall_s} s")
        finally:
            read.cancel()
        line = read.result()
        if not line.endswith(b"\n"):
            raise WorkerFailed(f"maths worker {self.pid} died: {await self._last_words()}")
        word, reason = json.loads(line)
        return word, reason

    def cpu_used_s(self) -> float:
        """CPU time of the worker since it started, of all its threads; 0 if it is gone."""
        try:
            return time.clock_gettime(~self.pid << 3 | _CPUCLOCK_SCHED)
        except OSError:
            return 0.0


def peak_rss_mib(pid: int) -> float:
    """Largest resident memory of a process since its exec; 0 if it is gone.

    Not `ru_maxrss`, which a child inherits from its parent: every worker of a parent with a few
    hundred MiB would look worn.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0.0
    return next((int(kib) / 1024 for kib in re.findall(r"VmHWM:\s+(\d+) kB", status)), 0.0)


class MathPool:
    """A fixed number of workers; a check takes an idle one, or waits for it.

    A worker that was killed, died or is worn is replaced before its place becomes idle again, so
    the pool keeps its size whatever the answers are.
    """

    def __init__(self, num_workers: int = 1, limits: MathLimits | None = None) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        self._num_workers = num_workers
        self._limits = limits or MathLimits()
        self._idle: asyncio.Queue[_Worker | None] = asyncio.Queue()
        self._alive: set[_Worker] = set()
        self.num_restarts = 0
        """How many workers were replaced since the start, for whatever reason."""

    async def start(self) -> None:
        """Start the workers. Raises WorkerFailed if one does not come up."""
        workers = await asyncio.gather(*(self._spawn() for _ in range(self._num_workers)))
        for worker in workers:
            self._idle.put_nowait(worker)

    async def check(self, reference: str, response_text: str) -> MathResult:
        """Check one answer; a fault of a worker is retried once in a fresh one, then INTERNAL."""
        result = await self._attempt(reference, response_text)
        if result.verdict is MathVerdict.INTERNAL:
            result = await self._attempt(reference, response_text)
        return result

    async def close(self) -> None:
        """Kill every worker."""
        await asyncio.gather(*(self._discard(worker) for worker in list(self._alive)))

    async def __aenter__(self) -> MathPool:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers that are alive."""
        return sorted(worker.pid for worker in self._alive)

    def cpu_used_s(self) -> float:
        """CPU time of the workers that are alive."""
        return sum(worker.cpu_used_s() for worker in self._alive)

    def peak_rss_mib(self) -> float:
        """The largest resident memory that a live worker has reported."""
        return max((worker.rss_mib for worker in self._alive), default=0.0)

    @property
    def is_confined(self) -> bool:
        """Whether every worker runs under a seccomp filter."""
        return all(worker.is_confined for worker in self._alive)

    async def _attempt(self, reference: str, response_text: str) -> MathResult:
        worker = await self._idle.get()
        keep = False
        try:
            if worker is None:
                worker = await self._spawn()
            result = await worker.run(reference, response_text)
            keep = result.verdict not in (MathVerdict.TIMEOUT, MathVerdict.INTERNAL)
            keep = keep and not worker.is_worn
            return result
        except (WorkerFailed, ConnectionError) as error:
            return MathResult(MathVerdict.INTERNAL, str(error))
        finally:
            # Also on cancellation: the job may still run, so its worker must not serve another.
            self._idle.put_nowait(worker if keep else None)
            if worker is not None and not keep:
                self.num_restarts += 1
                await asyncio.shield(self._discard(worker))

    async def _spawn(self) -> _Worker:
        worker = await _Worker.start(self._limits)
        self._alive.add(worker)
        return worker

    async def _discard(self, worker: _Worker) -> None:
        self._alive.discard(worker)
        await worker.kill()
