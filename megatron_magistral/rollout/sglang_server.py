"""How to start one SGLang server: its command line, its environment and the versions we accept.

Pure: nothing is spawned here, the supervisor of the roles does that. Where there is no CUDA device
the same SGLang runs on its torch-native backend, with stand-ins for three GPU-only packages that
live on that process's PYTHONPATH and nowhere else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from megatron_magistral.cluster import HUGE_PAGES

CPU_STUBS_DIR = Path(__file__).parent / "sglang_cpu_stubs"

OLDEST_SGLANG = Version("0.5.21")  # first with begin_weight_update / end_weight_update
NEWEST_TESTED_SGLANG = Version("0.5.23")

# SGLang stops a request 2 tokens before its context length and refuses a prompt within 7 tokens of
# it. The server gets so many more, for our `context_length` to mean what it says.
CONTEXT_RESERVE_TOKENS = 7

# Set by torchrun and read by torch.distributed: in a server started from a trainer's environment
# they would turn its own rendezvous into a client of the trainer's.
TORCHRUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
TORCHRUN_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_")


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


def detect_device() -> Device:
    """CUDA where the NVIDIA driver exposes a device, else CPU. Does not import torch."""
    return Device.CUDA if Path("/dev/nvidiactl").exists() else Device.CPU


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """One SGLang server with `tp` tensor-parallel ranks; replicas are separate servers.

    `context_length` bounds prompt + output tokens of one request; `max_total_tokens` is the size
    of the KV cache in tokens (CPU; None lets SGLang choose), `mem_fraction` the share of GPU
    memory for weights and KV cache. A response is streamed every `stream_interval_tokens` tokens:
    so many tokens of each request are lost at most when a server dies. `overlap_schedule` runs the
    scheduler one step ahead of the device; it needs our plugin and does nothing on a CPU.
    `base_gpu_id` is the first of the `tp` GPUs to use, where other processes have those before it.
    """

    model_dir: Path
    port: int
    context_length: int
    host: str = "127.0.0.1"
    tp: int = 1
    device: Device = field(default_factory=detect_device)
    dtype: str = "bfloat16"
    max_total_tokens: int | None = None
    mem_fraction: float | None = None
    max_running_requests: int | None = None
    stream_interval_tokens: int = 8
    overlap_schedule: bool = False
    random_seed: int | None = None
    base_gpu_id: int | None = None
    extra_args: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True)
class ModelLimits:
    """What a request must respect: ids in [0, vocab_size), prompt + output <= context_length."""

    vocab_size: int
    context_length: int


def model_limits(settings: ServerSettings) -> ModelLimits:
    """Read the limits from the model directory's `config.json`.

    Raises:
        ValueError: no readable `config.json`, or no `vocab_size` in it.
    """
    path = settings.model_dir / "config.json"
    try:
        vocab_size = json.loads(path.read_text())["vocab_size"]
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(
            f"{path}: expected a Hugging Face config with vocab_size: {error!r}"
        ) from error
    return ModelLimits(vocab_size, settings.context_length)


def server_command(settings: ServerSettings) -> list[str]:
    """The argument vector that starts the server.

    The tokenizer is left out: requests and responses are token ids, so only the caller decodes.
    """
    command = [sys.executable, "-m", "sglang.launch_server", "--skip-server-warmup"]
    options: dict[str, object] = {
        "--model-path": settings.model_dir,
        "--host": settings.host,
        "--port": settings.port,
        "--tp": settings.tp,
        "--device": settings.device,
        "--dtype": settings.dtype,
        "--context-length": settings.context_length + CONTEXT_RESERVE_TOKENS,
        "--stream-interval": settings.stream_interval_tokens,
        "--max-total-tokens": settings.max_total_tokens,
        "--mem-fraction-static": settings.mem_fraction,
        "--max-running-requests": settings.max_running_requests,
        "--random-seed": settings.random_seed,
        "--base-gpu-id": settings.base_gpu_id,
    }
    if settings.device is Device.CPU:
        options["--attention-backend"] = "torch_native"
        options["--sampling-backend"] = "pytorch"
        options["--grammar-backend"] = "none"
        command.append("--sleep-on-idle")  # else an idle scheduler spins on one of a few cores
    for option, value in options.items():
        if value is not None:
            command += [option, str(value)]
    command += ["--skip-tokenizer-init", "--incremental-streaming-output"]
    if settings.device is Device.CPU or not settings.overlap_schedule:
        command.append("--disable-overlap-schedule")
    return command + list(settings.extra_args)


def server_environment(settings: ServerSettings, base_env: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server process, derived from `base_env` (usually `os.environ`).

    `/health` answers without generating, also while the server is paused, and a crashed scheduler
    ends the server at once instead of after a minute of waiting for a core dump.
    """
    inherited_env = {n: value for n, value in base_env.items() if not _is_torchrun_variable(n)}
    env = HUGE_PAGES | inherited_env
    env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    env["SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS"] = "0"
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for CONTEXT_RESERVE_TOKENS
    if settings.device is Device.CUDA:
        return env
    inherited = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    env["PYTHONPATH"] = os.pathsep.join([str(CPU_STUBS_DIR), *inherited])
    env["SGLANG_USE_CPU_ENGINE"] = "1"
    env["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile would hand our triton stand-in real kernels
    env.setdefault("OMP_NUM_THREADS", "1")
    if settings.tp > 1:
        # By default every rank binds to a NUMA node of its own, and asserts that there are enough.
        cores = os.cpu_count() or 1
        env.setdefault(
            "SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(r % cores) for r in range(settings.tp))
        )
    return env


def _is_torchrun_variable(name: str) -> bool:
    prefixed = name.startswith(TORCHRUN_PREFIXES) and name.endswith(TORCHRUN_VARIABLES)
    return name in TORCHRUN_VARIABLES or prefixed or name.startswith("TORCHELASTIC_")


class VersionSupport(StrEnum):
    SUPPORTED = "supported"
    UNTESTED = "untested"
    TOO_OLD = "too_old"
    MISSING = "missing"


@dataclass(frozen=True)
class VersionStatus:
    """`support` of the installed SGLang; `message` says what to do unless it is SUPPORTED."""

    support: VersionSupport
    message: str = ""


def sglang_version_status(installed: str | None = None) -> VersionStatus:
    """Judge an SGLang version, by default the installed one. Does not import SGLang.

    Too old or missing is an error for the caller, untested a warning.
    """
    if installed is None:
        try:
            installed = metadata.version("sglang")
        except metadata.PackageNotFoundError:
            message = f"SGLang is not installed: pip install sglang=={NEWEST_TESTED_SGLANG}"
            return VersionStatus(VersionSupport.MISSING, message)
    version = Version(installed)
    if version < OLDEST_SGLANG:
        message = (
            f"SGLang {installed} is too old: {OLDEST_SGLANG} or newer has weight-update sessions"
        )
        return VersionStatus(VersionSupport.TOO_OLD, message)
    if version > NEWEST_TESTED_SGLANG:
        message = f"SGLang {installed} is newer than the newest tested, {NEWEST_TESTED_SGLANG}"
        return VersionStatus(VersionSupport.UNTESTED, message)
    return VersionStatus(VersionSupport.SUPPORTED)
