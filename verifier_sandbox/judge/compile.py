"""Compiling submissions in the jail, each distinct one once."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakValueDictionary

from verifier_sandbox.jail.build import Toolchain
from verifier_sandbox.jail.files import SealedFile
from verifier_sandbox.jail.launcher import Launcher, LauncherDiedError
from verifier_sandbox.jail.wire import Outcome, Profile, ProgramLimits, RunResult

_NS = 1_000_000_000
_MAX_BINARY_BYTES = 64 << 20
# cc1plus maps the precompiled header and peaks at 200 MiB on ordinary programs.
_ADDRESS_SPACE_BYTES = 1536 << 20
_WALL_S = 120
_MAX_MESSAGES = 4096


@dataclass(frozen=True)
class Compilation:
    """`binary` is None where the program does not compile."""

    binary: SealedFile | None
    messages: str
    cpu_ms: float


class CompileCache:
    """Binaries and compile errors by source, flags and compiler, least recently used go first.

    A compilation that ran into a limit is an error of the submission, but not remembered: on a
    quieter machine it may get through.
    """

    def __init__(self, toolchain: Toolchain, max_bytes: int = 512 << 20) -> None:
        self._toolchain = toolchain
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[str, Compilation] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.num_hits = 0
        self.num_misses = 0

    def key(self, source: str) -> str:
        identity = f"{self._toolchain.identity}\0{source}"
        return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()

    def get(self, source: str) -> Compilation | None:
        """The remembered result; counts as a use."""
        key = self.key(source)
        if found := self._entries.get(key):
            self._entries.move_to_end(key)
            self.num_hits += 1
        return found

    def lock(self, source: str) -> asyncio.Lock:
        """Held by whoever compiles this source, so that a group's duplicates compile once."""
        return self._locks.setdefault(self.key(source), asyncio.Lock())

    def put(self, source: str, compilation: Compilation) -> None:
        key = self.key(source)
        self.num_misses += 1
        self._entries[key] = compilation
        self._num_bytes += _size(compilation)
        while self._num_bytes > self._max_bytes and len(self._entries) > 1:
            _, evicted = self._entries.popitem(last=False)
            self._num_bytes -= _size(evicted)


def _size(compilation: Compilation) -> int:
    return len(compilation.messages) + (compilation.binary.size if compilation.binary else 0)


async def compile_cpp(
    launcher: Launcher, toolchain: Toolchain, source: str, cpu_s: float
) -> tuple[Compilation, bool]:
    """Compiles in the launcher's jail. Returns the result and whether it may be remembered.

    Raises LauncherDiedError when the machine, not the program, was at fault.
    """
    path, binary_path = launcher.scratch / "solution.cpp", launcher.scratch / "solution"
    path.write_text(source, encoding="utf-8", errors="surrogatepass")
    path.chmod(0o644)
    limits = ProgramLimits(
        Profile.COMPILER,
        cpu_ns=int(cpu_s * _NS),
        idle_ns=_WALL_S * _NS,
        wall_ns=_WALL_S * _NS,
        memory_bytes=_ADDRESS_SPACE_BYTES,
        output_bytes=_MAX_BINARY_BYTES,
    )
    command = [str(toolchain.compiler), *toolchain.flags, str(path), "-o", str(binary_path)]
    environment = ["PATH=/usr/bin:/bin", "LANG=C.UTF-8", f"TMPDIR={launcher.scratch}"]
    try:
        result = await launcher.compile(limits, command, environment, bound_s=_WALL_S + 30)
        return _read(launcher, result, cpu_s)
    finally:
        for entry in launcher.scratch.iterdir():
            entry.unlink(missing_ok=True)


def _read(launcher: Launcher, result: RunResult, cpu_s: float) -> tuple[Compilation, bool]:
    if result.outcome in (Outcome.START_FAILED, Outcome.WALL_LIMIT, Outcome.CANCELLED):
        raise LauncherDiedError(
            f"compiler: {result.outcome.name} after {result.wall_ns / _NS:.0f} s: "
            f"{os.strerror(result.code) if result.outcome is Outcome.START_FAILED else ''}"
        )
    messages = launcher.output(_MAX_MESSAGES).decode(errors="replace")
    messages = messages.replace(str(launcher.scratch) + "/", "")
    cpu_ms = result.cpu_ns / 1e6
    if result.outcome is Outcome.EXITED and result.code == 0:
        data = (launcher.scratch / "solution").read_bytes()
        return Compilation(SealedFile([data], "solution"), messages, cpu_ms), True
    if result.outcome is Outcome.EXITED:
        return Compilation(None, messages or f"compiler exited with {result.code}", cpu_ms), True
    limit = f"compiler stopped: {result.outcome.name.lower()} ({cpu_ms:.0f} ms CPU of {cpu_s:g} s)"
    return Compilation(None, f"{limit}\n{messages}", cpu_ms), False
