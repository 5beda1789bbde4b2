"""Starts the launcher of one slot and speaks to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verifier_sandbox.jail import landlock, policies
from verifier_sandbox.jail.build import (
    Toolchain,
    build_launcher,
    find_toolchain,
    slots_directory,
)
from verifier_sandbox.jail.cgroup import SlotCgroup
from verifier_sandbox.jail.files import SealedFile
from verifier_sandbox.jail.machine import Interpreter, Machine
from verifier_sandbox.jail.wire import (
    Compare,
    ProgramLimits,
    RunResult,
    TestSpans,
    pack_compile,
    pack_run,
    unpack_reply,
)

_POLICIES = (policies.CPP_STATIC, policies.CPP_DYNAMIC, policies.PYTHON, policies.COMPILER)
_DEVICES = tuple(Path(path) for path in ("/dev/null", "/dev/urandom", "/dev/random"))
_LIBRARIES = tuple(Path(path) for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64"))
_COMPILER_READS = (*_LIBRARIES, *(Path(p) for p in ("/usr", "/bin", "/etc/ld.so.cache")))
_MAX_REPLY_BYTES = 1 << 17
_CANCEL_GRACE_S = 5.0


class LauncherDiedError(RuntimeError):
    """The launcher ended or fell silent in mid-request: nobody's fault, to be tried again."""


@dataclass(frozen=True)
class Jail:
    """Everything that the launchers of a service have in common."""

    machine: Machine
    launcher: Path
    toolchain: Toolchain
    interpreter: Interpreter | None


def prepare(machine: Machine, interpreter: Interpreter | None) -> Jail:
    """Builds what must be built. Raises BuildError."""
    return Jail(machine, build_launcher(), find_toolchain(), interpreter)


class Launcher:
    """One launcher process. Serves one request at a time; every wait is bounded."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        output: int,
        scratch: Path,
        group: SlotCgroup | None,
    ) -> None:
        self._process = process
        self._group = group
        self._control = control
        self._output = output
        self.scratch = scratch
        """A directory that compilations of this slot may write."""

    @classmethod
    def start(cls, jail: Jail, slot: int) -> Launcher:
        """Starts the launcher of slot number `slot`. Raises OSError if it cannot be started."""
        base = jail.machine.slot_uid_base
        uid = -1 if base is None else base + slot
        scratch = Path(tempfile.mkdtemp(prefix=f"slot-{slot}-", dir=slots_directory()))
        if uid >= 0:
            os.chown(scratch, uid, uid)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        output = os.memfd_create("output", os.MFD_CLOEXEC)
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            passed = [theirs.fileno(), output]
            profiles = []
            for policy, ruleset in zip(_POLICIES, _rulesets(jail, scratch), strict=True):
                code = stack.enter_context(SealedFile([policy.filter_bytes()], policy.name))
                if ruleset >= 0:
                    stack.callback(os.close, ruleset)
                profiles.append(f"{code.fd}:{ruleset}")
                passed += [fd for fd in (code.fd, ruleset) if fd >= 0]
            process = subprocess.Popen(
                [
                    jail.launcher,
                    *map(str, (passed[0], output, uid)),
                    *profiles,
                    "--",
                    *_zygote(jail),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=passed,
                env={},
                cwd="/",
                start_new_session=True,
            )
        group = SlotCgroup.create(str(slot)) if jail.machine.has_memory_cgroup else None
        if group is not None:
            group.add(process.pid)
        return cls(process, ours, output, scratch, group)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(
        self,
        programs: Sequence[tuple[ProgramLimits, int]],
        blob: int,
        tests: Sequence[TestSpans],
        compare: Compare,
        bound_s: float,
    ) -> list[list[RunResult]]:
        """Runs tests in order up to the first that failed or that the launcher cannot compare.

        `programs` are limits and the descriptor of a binary or a Python source: one, or two that
        talk over crossed pipes. Raises LauncherDiedError.
        """
        request = pack_run([limits for limits, _ in programs], tests, compare)
        descriptors = [*(fd for _, fd in programs), blob]
        return unpack_reply(await self._exchange(request, descriptors, bound_s))

    async def compile(
        self,
        limits: ProgramLimits,
        arguments: Sequence[str],
        environment: Sequence[str],
        bound_s: float,
    ) -> RunResult:
        """Runs the compiler in the jail. Raises LauncherDiedError."""
        request = pack_compile(limits, arguments, environment)
        return unpack_reply(await self._exchange(request, [], bound_s))[0][0]

    def output(self, num_bytes: int, offset: int = 0) -> bytes:
        """The standard output of the last test, or the messages of the compiler."""
        return os.pread(self._output, num_bytes, offset)

    async def _exchange(self, request: bytes, descriptors: list[int], bound_s: float) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            socket.send_fds(self._control, [request], descriptors)
            receive = asyncio.ensure_future(loop.sock_recv(self._control, _MAX_REPLY_BYTES))
            done, _ = await asyncio.wait({receive}, timeout=bound_s)
        except OSError as error:
            raise LauncherDiedError(f"launcher {self.pid}: {error}") from error
        except asyncio.CancelledError:
            await self._cancel(receive)
            raise
        if not done:
            receive.cancel()
            raise LauncherDiedError(f"launcher {self.pid} silent for {bound_s:.0f} s")
        reply = receive.result() if receive.exception() is None else b""
        if not reply:
            raise LauncherDiedError(f"launcher {self.pid} died in mid-request")
        return reply

    async def _cancel(self, receive: asyncio.Future[bytes]) -> None:
        """Has the launcher stop the program; kills the launcher if it does not answer."""
        with contextlib.suppress(OSError):
            self._control.send(b"stop")
        done, _ = await asyncio.wait({receive}, timeout=_CANCEL_GRACE_S)
        if not done:
            receive.cancel()
            self.kill()

    def kill(self) -> None:
        """SIGKILL; what the launcher runs dies with it."""
        self._process.kill()

    def close(self) -> None:
        """Ends the launcher and all it runs, and removes its directory."""
        self._control.close()
        with contextlib.suppress(OSError):
            os.close(self._output)
        try:
            self._process.wait(timeout=_CANCEL_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait(timeout=_CANCEL_GRACE_S)
        if self._group is not None:
            self._group.remove()
        shutil.rmtree(self.scratch, ignore_errors=True)


def _zygote(jail: Jail) -> list[str]:
    if jail.interpreter is None:
        return ["/nonexistent-interpreter"]
    script = (Path(__file__).parent / "zygote.py").read_text()
    return [str(jail.interpreter.executable), "-s", "-B", "-c", script]


def _rulesets(jail: Jail, scratch: Path) -> list[int]:
    """Landlock rulesets in the order of the profiles; -1 where the kernel has no Landlock."""
    if jail.machine.landlock_version == 0:
        return [-1] * len(_POLICIES)
    python = jail.interpreter.readable if jail.interpreter else ()
    compiler = (*_COMPILER_READS, jail.toolchain.header_directory)
    return [
        landlock.create_ruleset(),
        landlock.create_ruleset(_LIBRARIES, devices=_DEVICES),
        landlock.create_ruleset(python, devices=_DEVICES),
        landlock.create_ruleset(compiler, writable=[scratch], devices=[Path("/dev/null")]),
    ]
