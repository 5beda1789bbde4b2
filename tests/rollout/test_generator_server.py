"""How a server is started: pure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_magistral.cluster import HUGE_PAGES
from megatron_magistral.rollout.sglang_server import (
    CONTEXT_RESERVE_TOKENS,
    CPU_STUBS_DIR,
    Device,
    ServerSettings,
    VersionSupport,
    model_limits,
    server_command,
    server_environment,
    sglang_version_status,
)


def settings_of(**changes) -> ServerSettings:
    values = {
        "model_dir": Path("/models/tiny"),
        "port": 30001,
        "context_length": 100,
        "device": Device.CPU,
    }
    return ServerSettings(**(values | changes))


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_command_carries_the_settings() -> None:
    command = server_command(
        settings_of(tp=2, dtype="float32", max_total_tokens=4096, extra_args=("--page-size", "1"))
    )
    assert command[1:3] == ["-m", "sglang.launch_server"]
    assert option(command, "--model-path") == "/models/tiny"
    assert option(command, "--port") == "30001"
    assert option(command, "--tp") == "2"
    assert option(command, "--dtype") == "float32"
    assert option(command, "--max-total-tokens") == "4096"
    assert option(command, "--context-length") == str(100 + CONTEXT_RESERVE_TOKENS)
    assert command[-2:] == ["--page-size", "1"]
    assert "--mem-fraction-static" not in command


def test_the_cpu_gets_the_torch_native_backend_and_cuda_its_own() -> None:
    cpu = server_command(settings_of())
    cuda = server_command(settings_of(device=Device.CUDA, overlap_schedule=True))
    assert option(cpu, "--attention-backend") == "torch_native"
    assert "--attention-backend" not in cuda
    assert "--disable-overlap-schedule" in cpu
    assert "--disable-overlap-schedule" not in cuda
    assert "--disable-overlap-schedule" in server_command(settings_of(device=Device.CUDA))


def test_large_tensors_lie_on_huge_pages_unless_the_user_says_otherwise() -> None:
    assert server_environment(settings_of(), {}).items() >= HUGE_PAGES.items()
    theirs = dict.fromkeys(HUGE_PAGES, "0")
    assert server_environment(settings_of(), theirs).items() >= theirs.items()


def test_the_stand_ins_are_on_the_path_of_cpu_servers_alone() -> None:
    base = {"PYTHONPATH": "/mine", "PATH": "/bin"}
    cpu = server_environment(settings_of(), base)
    cuda = server_environment(settings_of(device=Device.CUDA), base)
    assert cpu["PYTHONPATH"].split(":") == [str(CPU_STUBS_DIR), "/mine"]
    assert cpu["SGLANG_USE_CPU_ENGINE"] == "1"
    assert cuda["PYTHONPATH"] == "/mine"
    assert "SGLANG_USE_CPU_ENGINE" not in cuda
    assert base == {"PYTHONPATH": "/mine", "PATH": "/bin"}


def test_the_environment_drops_what_torchrun_set() -> None:
    base = {name: "1" for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "GROUP_WORLD_SIZE")}
    base |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "/root", "RANKING": "kept"}
    env = server_environment(settings_of(), base)
    assert not {"RANK", "LOCAL_RANK", "MASTER_ADDR", "GROUP_WORLD_SIZE"} & set(env)
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env
    assert env["HOME"] == "/root" and env["RANKING"] == "kept"


def test_tensor_parallel_ranks_on_a_cpu_are_bound_to_cores() -> None:
    env = server_environment(settings_of(tp=2), {})
    assert len(env["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in server_environment(settings_of(), {})


@pytest.mark.parametrize(
    ("version", "support"),
    [
        ("0.5.20", VersionSupport.TOO_OLD),
        ("0.5.21", VersionSupport.SUPPORTED),
        ("0.5.23", VersionSupport.SUPPORTED),
        ("0.5.23.post1", VersionSupport.UNTESTED),
        ("0.6.0", VersionSupport.UNTESTED),
    ],
)
def test_the_version_gate(version: str, support: VersionSupport) -> None:
    status = sglang_version_status(version)
    assert status.support is support
    assert bool(status.message) == (support is not VersionSupport.SUPPORTED)


def test_limits_come_from_the_model_directory(tmp_path: Path) -> None:
    settings = settings_of(model_dir=tmp_path)
    with pytest.raises(ValueError, match=r"config\.json"):
        model_limits(settings)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 320}))
    limits = model_limits(settings)
    assert (limits.vocab_size, limits.context_length) == (320, 100)


STAND_IN_PROGRAM = """
import triton
import triton.language as tl
from torchvision.transforms import InterpolationMode
from triton.runtime.errors import OutOfResources
from sgl_kernel import some_op

@triton.autotune(configs=[triton.Config({})], key=["n"])
@triton.jit
def kernel(x: tl.constexpr):
    return x + 1

assert kernel.fn(1) == 2 and issubclass(OutOfResources, Exception)
assert InterpolationMode.BICUBIC == "BICUBIC" and triton.cdiv(5, 2) == 3
try:
    kernel[(1,)](1)
except NotImplementedError as error:
    print(error)
"""


def test_stand_in_kernels_can_be_declared_but_not_launched() -> None:
    env = server_environment(settings_of(), {})
    run = [sys.executable, "-c", STAND_IN_PROGRAM]
    result = subprocess.run(run, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "kernel kernel was launched on a machine without CUDA\n"
