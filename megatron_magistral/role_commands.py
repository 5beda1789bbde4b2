"""How each role of a run is started: its command line. Pure.

The local launcher and the roles of a SLURM job start the same processes; only hosts, ports and
GPUs differ.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_magistral.cluster import python_module
from megatron_magistral.config import Config
from megatron_magistral.rollout.sglang_server import Device, ServerSettings
from megatron_magistral.run_folder import RunFolder, Stage

LOOPBACK = "127.0.0.1"


def prepare_command(run: RunFolder) -> tuple[str, ...]:
    return python_module("megatron_magistral.prepare", "--run", str(run.root))


def generator_settings(
    config: Config,
    run: RunFolder,
    *,
    port: int,
    context_length: int,
    base_gpu_id: int | None,
    host: str = LOOPBACK,
) -> ServerSettings:
    """One replica, on `tensor_parallel` GPUs of its node from `base_gpu_id` on; None: on CPUs."""
    return ServerSettings(
        model_dir=run.rl_model(config),
        host=host,
        port=port,
        context_length=context_length,
        tp=config.generator.tensor_parallel,
        base_gpu_id=base_gpu_id,
        device=Device.CPU if base_gpu_id is None else Device.CUDA,
        dtype=config.generator.dtype,
        max_total_tokens=config.generator.max_total_tokens,
        extra_args=config.generator.extra_arguments,
    )


def verifier_command(config: Config, *where: str) -> tuple[str, ...]:
    """`where` is `--socket PATH`, or `--host HOST --port PORT`."""
    slots = config.verifier.num_slots or os.cpu_count() or 1
    return python_module(
        "verifier_sandbox",
        "serve",
        *where,
        "--num-slots",
        str(slots),
        "--num-maths-workers",
        str(config.verifier.num_maths_workers),
    )


def controller_command(
    run: RunFolder,
    port: int,
    generators: Sequence[str],
    *,
    host: str = LOOPBACK,
    verifiers: Sequence[str] = (),
) -> tuple[str, ...]:
    """`verifiers` are URLs; without any, it speaks to the socket in the run folder."""
    command = python_module(
        "megatron_magistral.rollout.role",
        *("--run", str(run.root), "--host", host, "--port", str(port)),
        *("--generators", ",".join(generators)),
    )
    return (*command, "--verifiers", ",".join(verifiers)) if verifiers else command


def selection_command(
    run: RunFolder, generators: Sequence[str], *, verifiers: Sequence[str] = ()
) -> tuple[str, ...]:
    """As `controller_command`, for the stage that keeps the best weights of SFT."""
    command = python_module(
        "megatron_magistral.selection",
        *("--run", str(run.root), "--generators", ",".join(generators)),
    )
    return (*command, "--verifiers", ",".join(verifiers)) if verifiers else command


def trainer_command(
    run: RunFolder,
    stage: Stage,
    *,
    host: str = LOOPBACK,
    controller: str = "",
    generators: Sequence[str] = (),
) -> tuple[str, ...]:
    """One rank; `host` is where generators reach it. torchrun's variables say which rank it is."""
    command = python_module(
        "megatron_magistral.trainer.role", "--run", str(run.root), "--stage", stage
    )
    if stage is Stage.SFT:
        return command
    urls = ",".join(generators)
    return (*command, "--host", host, "--controller", controller, "--generators", urls)
