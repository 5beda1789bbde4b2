"""Checks this machine for every role, each with a remedy. `train` refuses with the same words."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import psutil
from packaging.version import Version
from rich.table import Table
from rich.text import Text

from megatron_magistral.cluster import free_ports, port_is_free
from megatron_magistral.rollout.sglang_server import VersionSupport, sglang_version_status
from megatron_magistral.trainer.versions import Support, megatron_support

# Two trainer ranks, one SGLang server of three processes, controller and verifiers of a tiny model.
MEMORY_NEEDED_MIB = 6 * 1024
SHARED_MEMORY_NEEDED_MIB = 64
SYS_LANDLOCK_CREATE_RULESET = 444
LANDLOCK_CREATE_RULESET_VERSION = 1


class Health(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Works without it; worth knowing."""
    FAIL = "fail"


# What only the RL stage asks of a machine: an SFT run does without.
RL_ONLY = frozenset({"SGLang", "fastText lid.176", "g++", "seccomp", "Landlock"})


@dataclass(frozen=True)
class Finding:
    name: str
    health: Health
    seen: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}" + (f"; {self.remedy}" if self.remedy else "")


def examine(ports: Sequence[int] = ()) -> list[Finding]:
    """Every check, in the order of a table. `ports` are those that a config fixes."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _torch,
        _cuda,
        megatron,
        lambda: _optional("transformer_engine", "Megatron's local layers are used instead"),
        lambda: _optional("apex", "our own Adam and unfused kernels are used instead"),
        _sglang,
        _fasttext,
        _compiler,
        _seccomp,
        _landlock,
        _memory,
        _shared_memory,
        _loopback,
        _slurm,
    )
    return [check() for check in checks] + [_port(port) for port in ports]


def failures(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.health is Health.FAIL]


def as_table(findings: Sequence[Finding]) -> Table:
    styles = {Health.OK: "green", Health.NOTE: "yellow", Health.FAIL: "bold red"}
    table = Table("check", "", "seen", "remedy", title="This machine, for every role")
    for item in findings:
        health = Text(item.health, style=styles[item.health])
        table.add_row(item.name, health, Text(item.seen), Text(item.remedy))
    return table


def _python() -> Finding:
    seen = platform.python_version()
    if sys.version_info >= (3, 12):
        return Finding("Python", Health.NOTE, seen, "tested with Python 3.11")
    return Finding("Python", Health.OK, seen)


def _installed(package: str) -> Version | None:
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def _torch() -> Finding:
    version = _installed("torch")
    if version is None:
        return Finding("torch", Health.FAIL, "not installed", "run `make install`")
    return Finding("torch", Health.OK, str(version))


def _cuda() -> Finding:
    if not Path("/dev/nvidiactl").exists():
        return Finding("CUDA", Health.NOTE, "no device: CPU and gloo are used")
    import torch  # seconds to import, so only where there is a device to ask about

    if not torch.cuda.is_available():
        return Finding(
            "CUDA",
            Health.FAIL,
            "a device, but torch cannot use it",
            "install a CUDA build of torch",
        )
    name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
    return Finding("CUDA", Health.OK, f"{count} x {name}, torch for CUDA {torch.version.cuda}")


def megatron() -> Finding:
    version = _installed("megatron-core")
    if version is None:
        return Finding("Megatron-core", Health.FAIL, "not installed", "run `make install`")
    support = megatron_support(str(version))
    health = {
        Support.TESTED: Health.OK,
        Support.UNTESTED: Health.NOTE,
        Support.TOO_OLD: Health.FAIL,
    }
    return Finding("Megatron-core", health[support], str(version), support.remedy)


def _optional(module: str, otherwise: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(module, Health.NOTE, "not installed", otherwise)
    return Finding(module, Health.OK, "installed")


def _sglang() -> Finding:
    status = sglang_version_status()
    seen = str(_installed("sglang") or "not installed")
    match status.support:
        case VersionSupport.SUPPORTED:
            return Finding("SGLang", Health.OK, seen)
        case VersionSupport.UNTESTED:
            return Finding("SGLang", Health.NOTE, seen, status.message)
    return Finding("SGLang", Health.FAIL, seen, status.message)


def _fasttext() -> Finding:
    name, remedy = "fastText lid.176", "run `make install`"
    if importlib.util.find_spec("fasttext") is None:
        return Finding(name, Health.FAIL, "fasttext-predict is not installed", remedy)
    from megatron_magistral.rewards.language import shipped_model  # imports fasttext

    try:
        path = shipped_model()
    except FileNotFoundError as error:
        return Finding(name, Health.FAIL, str(error), remedy)
    return Finding(name, Health.OK, f"{path.name} of {path.stat().st_size // 1024} KiB")


def _compiler() -> Finding:
    path = shutil.which("g++")
    if path is None:
        return Finding("g++", Health.FAIL, "not found", "install g++ (Debian: apt install g++)")
    probe = subprocess.run(
        [path, "-std=c++20", "-x", "c++", "-fsyntax-only", "-"],
        input=b"int main() {}",
        capture_output=True,
        timeout=60,
        check=False,
    )
    if probe.returncode:
        return Finding("g++", Health.FAIL, "does not accept -std=c++20", "install g++ 10 or newer")
    version = subprocess.run(
        [path, "-dumpfullversion"], capture_output=True, text=True, timeout=60, check=False
    )
    return Finding("g++", Health.OK, version.stdout.strip())


def _seccomp() -> Finding:
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    if not actions.exists() or "errno" not in actions.read_text():
        return Finding(
            "seccomp", Health.FAIL, "the kernel has no filters", "run on a kernel with seccomp-bpf"
        )
    return Finding("seccomp", Health.OK, "filters")


def _landlock() -> Finding:
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(
        SYS_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_CREATE_RULESET_VERSION
    )
    if abi < 1:
        why = os.strerror(ctypes.get_errno())
        return Finding(
            "Landlock",
            Health.NOTE,
            f"not available ({why})",
            "Python submissions are refused without it; use Linux 5.13 or newer",
        )
    return Finding("Landlock", Health.OK, f"ABI {abi}")


def _memory() -> Finding:
    free_mib = min(psutil.virtual_memory().available // 2**20, container_memory_mib())
    if free_mib < MEMORY_NEEDED_MIB:
        remedy = f"free at least {MEMORY_NEEDED_MIB} MiB"
        return Finding("free memory", Health.FAIL, f"{free_mib} MiB", remedy)
    return Finding("free memory", Health.OK, f"{free_mib} MiB")


def container_memory_mib(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """What the limit of our control group leaves, MiB; infinite without one (cgroup v2).

    Its file cache counts as free: the kernel gives it back before it refuses memory.
    """
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(
            line.split() for line in (cgroup / "memory.stat").read_text().splitlines()
        )
    except FileNotFoundError:
        return math.inf
    if limit == "max":
        return math.inf
    return (int(limit) - used + int(statistics["inactive_file"])) // 2**20


def _shared_memory() -> Finding:
    free_mib = shutil.disk_usage("/dev/shm").free // 2**20 if Path("/dev/shm").exists() else 0
    if free_mib < SHARED_MEMORY_NEEDED_MIB:
        remedy = "give the container a larger /dev/shm (docker: --shm-size=1g)"
        return Finding("/dev/shm", Health.FAIL, f"{free_mib} MiB free", remedy)
    return Finding("/dev/shm", Health.OK, f"{free_mib} MiB free")


def _loopback() -> Finding:
    try:
        free_ports(1)
    except OSError as error:
        seen = f"127.0.0.1 gives no free port: {error.strerror}"
        return Finding("ports", Health.FAIL, seen, "bring the loopback interface up")
    return Finding("ports", Health.OK, "127.0.0.1 gives free ones")


def _slurm() -> Finding:
    if shutil.which("sbatch") is None:
        return Finding("SLURM", Health.NOTE, "no sbatch: only this machine can be used")
    return Finding("SLURM", Health.OK, "sbatch found")


def _port(port: int) -> Finding:
    if port_is_free(port):
        return Finding(f"port {port}", Health.OK, "free")
    return Finding(
        f"port {port}", Health.FAIL, "taken", "end what listens there, or set another port (0: any)"
    )
