"""Builds the launcher and the precompiled header, once per compiler and flags.

Results lie in a cache directory that slots' users can read and only we can write. Each is made
under a temporary name and renamed, so that a half-made one is never seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "VERIFIER_CACHE_DIR"
BASE_FLAGS = ("-std=c++20", "-O2", "-DONLINE_JUDGE", "-w")
_SOURCES = ("launcher.c", "confine.c", "supervise.c", "run.c", "jail.h", "wire.h")
_STARTUP = "startup.c"  # linked into every submission
_BUILD_TIMEOUT_S = 300
# Tried in this order. gold links a static binary in half the time that ld.bfd takes.
_LINKAGES = (("-static", "-s", "-fuse-ld=gold"), ("-static", "-s"), ("-s",))


class BuildError(RuntimeError):
    """There is no usable C++ compiler, or it cannot build the launcher."""


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler as submissions meet it."""

    compiler: Path
    version: str
    link_flags: tuple[str, ...]
    header_directory: Path
    """Holds `bits/stdc++.h.gch`; searched before the compiler's own directories. And startup.o."""

    @property
    def is_static(self) -> bool:
        return "-static" in self.link_flags

    @property
    def flags(self) -> tuple[str, ...]:
        startup = str(self.header_directory / "startup.o")
        return (*BASE_FLAGS, f"-I{self.header_directory}", *self.link_flags, startup)

    @property
    def identity(self) -> str:
        """What a cached binary depends on besides its source."""
        return "\0".join((self.version, *self.flags))


def cache_directory() -> Path:
    """`$VERIFIER_CACHE_DIR`, or one of this user's in the temporary directory.

    Not in the home directory, which a slot's user may not enter. Raises BuildError if somebody
    else owns it.
    """
    default = Path(tempfile.gettempdir()) / f"verifier-sandbox-{os.getuid()}"
    directory = Path(os.environ.get(CACHE_VARIABLE, default))
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or directory.is_symlink():
        raise BuildError(
            f"cache directory {directory} can be written by others; "
            f"set {CACHE_VARIABLE} to a directory that only you can write"
        )
    return directory


def slots_directory() -> Path:
    """Where this process's slots have their directories; removes those of processes that died."""
    parent = cache_directory() / "slots"
    parent.mkdir(mode=0o755, exist_ok=True)
    for entry in parent.iterdir():
        if entry.name.isdecimal() and not Path("/proc", entry.name).exists():
            shutil.rmtree(entry, ignore_errors=True)
    own = parent / str(os.getpid())
    own.mkdir(mode=0o755, exist_ok=True)
    return own


def build_launcher() -> Path:
    """The launcher's executable. Raises BuildError with the compiler's message."""
    compiler = _find_compiler("gcc", "cc", "g++")
    here = Path(__file__).parent
    digest = hashlib.sha256(_version(compiler).encode())
    for name in _SOURCES:
        digest.update((here / name).read_bytes())
    sources = [str(here / name) for name in _SOURCES if name.endswith(".c")]

    def make(target: Path) -> None:
        # A dynamic launcher works too, but starts each child from a larger process.
        for linkage in (("-static",), ()):
            command = [str(compiler), "-O2", "-std=gnu11", *linkage, "-o", str(target), *sources]
            answer = _compile(command)
            if answer.returncode == 0:
                return
        raise BuildError(f"building the launcher failed: {answer.stderr.strip()}")

    return _cached(f"launcher-{digest.hexdigest()[:16]}", make)


def find_toolchain() -> Toolchain:
    """The C++ compiler with its precompiled header and startup.o, built now if they were not yet.

    Raises BuildError if there is none that knows C++20.
    """
    compiler = _find_compiler("g++")
    version = _version(compiler)
    startup = Path(__file__).parent / _STARTUP
    digest = hashlib.sha256("\0".join((version, *BASE_FLAGS, startup.read_text())).encode())

    def make(target: Path) -> None:
        (target / "bits").mkdir(parents=True)
        header = target / "bits" / "stdc++.h"
        header.write_text("#include_next <bits/stdc++.h>\n")
        output = f"{header}.gch"
        command = [str(compiler), *BASE_FLAGS, "-x", "c++-header", str(header), "-o", output]
        answer = _compile(command)
        if answer.returncode != 0:
            raise BuildError(f"precompiling bits/stdc++.h failed: {answer.stderr.strip()}")
        output = str(target / "startup.o")
        answer = _compile([str(compiler), "-x", "c", "-O2", "-c", str(startup), "-o", output])
        if answer.returncode != 0:
            raise BuildError(f"compiling {_STARTUP} failed: {answer.stderr.strip()}")

    headers = _cached(f"headers-{digest.hexdigest()[:16]}", make)
    return Toolchain(compiler, version, _link_flags(compiler), headers)


def _link_flags(compiler: Path) -> tuple[str, ...]:
    program = "#include <iostream>\nint main() { std::cout << 1; }\n"
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "probe.cpp"
        source.write_text(program)
        for linkage in _LINKAGES:
            command = [str(compiler), str(source), "-o", f"{directory}/probe", *linkage]
            answer = _compile(command)
            if answer.returncode == 0:
                return linkage
    raise BuildError(f"{compiler} cannot link a program: {answer.stderr.strip()}")


def _find_compiler(*names: str) -> Path:
    for name in names:
        if path := shutil.which(name, path=f"/usr/bin:/usr/local/bin:{os.environ.get('PATH', '')}"):
            return Path(path).resolve()
    raise BuildError(f"no C++ compiler: none of {', '.join(names)} is installed")


def _version(compiler: Path) -> str:
    answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60)
    return f"{compiler} {answer.stdout.splitlines()[0] if answer.stdout else ''}"


def _compile(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {_BUILD_TIMEOUT_S} s") from error


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    directory = cache_directory()
    target = directory / name
    with _lock(directory / f"{name}.lock"):
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch) / "made"
            make(made)
            _make_readable(made)
            made.rename(target)
    return target


def _make_readable(path: Path) -> None:
    if not path.is_dir():
        path.chmod(0o755)
        return
    for parent, _, files in os.walk(path):
        os.chmod(parent, 0o755)
        for file in files:
            os.chmod(os.path.join(parent, file), 0o644)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
