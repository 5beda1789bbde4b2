"""What `magistral train` does on one machine: prepare, SFT, RL, each stage with its processes.

prepare        makes the world and the initial model, where the config asks for them
sft            trainer ranks
rl             trainer ranks, SGLang servers, verifier service, rollout controller
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from rich.console import Console

from megatron_magistral.cluster import (
    Role,
    Supervisor,
    free_ports,
    python_module,
    trainer_roles,
)
from megatron_magistral.config import Config
from megatron_magistral.config_file import dump
from megatron_magistral.display import RunView, final_table
from megatron_magistral.evals.report import EvalReport
from megatron_magistral.preflight import (
    check_inputs,
    check_machine,
    fixed_ports,
    make_run_folder,
)
from megatron_magistral.rollout.sglang_server import (
    Device,
    ServerSettings,
    detect_device,
    server_command,
    server_environment,
)
from megatron_magistral.run_folder import RunFolder

PREPARE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Ports:
    rendezvous: int
    controller: int
    generators: tuple[int, ...]

    @staticmethod
    def choose(config: Config) -> Ports:
        """Free ports, or for the generators those that the config fixes."""
        num_replicas = config.generator.num_replicas
        rendezvous, controller, *generators = free_ports(2 + num_replicas)
        if config.generator.port:
            generators = fixed_ports(config)
        return Ports(rendezvous, controller, tuple(generators))


def prepare_role(run: RunFolder) -> Role:
    return _python_role("prepare", "megatron_magistral.prepare", run)


def sft_roles(config: Config, run: RunFolder, port: int) -> list[Role]:
    return _trainers(config, run, "sft", port)


def rl_roles(config: Config, run: RunFolder, ports: Ports, context_length: int) -> list[Role]:
    """Servers first: they take longest to start."""
    generators = [
        Role(
            f"generator-{i}",
            tuple(server_command(settings)),
            run.log(f"generator-{i}"),
            server_environment(settings, os.environ),
        )
        for i, settings in enumerate(_server_settings(config, run, ports, context_length))
    ]
    urls = ",".join(f"http://127.0.0.1:{port}" for port in ports.generators)
    verifier = Role(
        "verifier", _verifier_command(config, run), run.log("verifier"), dict(os.environ)
    )
    controller = _python_role(
        "controller",
        "megatron_magistral.rollout.role",
        run,
        "--port",
        str(ports.controller),
        "--generators",
        urls,
    )
    trainers = _trainers(
        config,
        run,
        "rl",
        ports.rendezvous,
        "--controller",
        f"http://127.0.0.1:{ports.controller}",
        "--generators",
        urls,
    )
    return [*generators, verifier, controller, *trainers]


def planned_roles(config: Config, run: RunFolder, context_length: int) -> dict[str, list[Role]]:
    """Every process that `train` would start, by stage and in order; for `--dry-run`."""
    ports = Ports.choose(config)
    stages = {"prepare": [prepare_role(run)]}
    if config.sft is not None:
        stages["sft"] = sft_roles(config, run, ports.rendezvous)
    if config.rl is not None:
        stages["rl"] = rl_roles(config, run, ports, context_length)
    return stages


def train(config: Config, console: Console) -> RunFolder:
    """Run every stage of the config; show progress; end with the table of held-out results.

    Raises ConfigError or Refused before anything is started, RoleFailed or StageTimeout after.
    """
    inputs = check_inputs(config)
    check_machine(config)
    run = make_run_folder(config)
    run.config.write_text(dump(config), encoding="utf-8")
    for warning in inputs.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    console.print(f"run folder: {run.root}", highlight=False, soft_wrap=True)
    num_steps = {
        stage: section.num_steps
        for stage, section in (("sft", config.sft), ("rl", config.rl))
        if section is not None
    }
    with Supervisor() as supervisor, RunView(console, run.metrics, num_steps, run.phase) as view:
        view.phase("preparing data and model")
        supervisor.start(prepare_role(run))
        supervisor.wait_for(["prepare"], tick=view.refresh, timeout_s=PREPARE_TIMEOUT_S)
        if config.sft is not None:
            _run_stage(supervisor, view, sft_roles(config, run, free_ports(1)[0]), "SFT cold start")
        if config.rl is not None:
            roles = rl_roles(config, run, Ports.choose(config), inputs.context_length)
            _run_stage(supervisor, view, roles, "RL: starting generators, verifiers and trainers")
    if config.rl is not None:
        before, after = EvalReport.load(run.eval_before_rl), EvalReport.load(run.eval_after_rl)
        console.print(final_table(before, after))
    console.print(f"run folder: {run.root}", highlight=False, soft_wrap=True)
    return run


def _run_stage(supervisor: Supervisor, view: RunView, roles: list[Role], phase: str) -> None:
    view.phase(phase)
    for role in roles:
        supervisor.start(role)
    finishing = [role.name for role in roles if role.name.startswith(("trainer", "controller"))]
    supervisor.wait_for(finishing, tick=view.refresh)
    view.refresh()
    supervisor.stop_all()


def _server_settings(
    config: Config, run: RunFolder, ports: Ports, context_length: int
) -> list[ServerSettings]:
    tp, on_gpus = config.generator.tensor_parallel, detect_device() is Device.CUDA
    return [
        ServerSettings(
            model_dir=run.rl_model(config),
            port=port,
            context_length=context_length,
            tp=tp,
            # Trainer rank r has GPU r; generators have those after them.
            base_gpu_id=config.parallel.world_size + index * tp if on_gpus else None,
            dtype=config.generator.dtype,
            max_total_tokens=config.generator.max_total_tokens,
            extra_args=config.generator.extra_arguments,
        )
        for index, port in enumerate(ports.generators)
    ]


def _verifier_command(config: Config, run: RunFolder) -> tuple[str, ...]:
    slots = config.verifier.num_slots or os.cpu_count() or 1
    return python_module(
        "verifier_sandbox",
        "serve",
        "--socket",
        str(run.verifier_socket),
        "--num-slots",
        str(slots),
        "--num-maths-workers",
        str(config.verifier.num_maths_workers),
    )


def _trainers(config: Config, run: RunFolder, stage: str, port: int, *arguments: str) -> list[Role]:
    command = python_module(
        "megatron_magistral.trainer.role", "--run", str(run.root), "--stage", stage, *arguments
    )
    return trainer_roles(command, config.parallel.world_size, run.log, port=port)


def _python_role(name: str, module: str, run: RunFolder, *arguments: str) -> Role:
    command = python_module(module, "--run", str(run.root), *arguments)
    return Role(name, command, run.log(name), dict(os.environ))
