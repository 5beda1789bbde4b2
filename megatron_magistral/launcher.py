"""What `magistral train` does on one machine: prepare, SFT, RL, each stage with its processes.

prepare        makes the world and the initial model, where the config asks for them
sft            trainer ranks
rl             trainer ranks, SGLang servers, verifier service, rollout controller

`magistral resume` does what is left of that: stages that have ended are not repeated, the one that
was interrupted goes on after its latest checkpoint. The trainers find that themselves; here it is
checked before anything starts.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from megatron_magistral.cluster import (
    Role,
    Supervisor,
    free_ports,
    python_module,
    trainer_roles,
)
from megatron_magistral.config import Config
from megatron_magistral.config_file import dump, load
from megatron_magistral.display import RunView, final_table
from megatron_magistral.evals.report import EvalReport
from megatron_magistral.preflight import (
    Inputs,
    Refused,
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
from megatron_magistral.run_folder import RunFolder, Stage
from megatron_magistral.trainer.checkpoint_files import CheckpointError, CheckpointFolder
from megatron_magistral.trainer.fingerprint import training_values

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
    with run.lock("launcher"):
        _run_stages(config, run, inputs, console)
    return run


def resume(config: Config, run: RunFolder, console: Console, *, step: int | None = None) -> None:
    """Go on with an interrupted run in its own folder, with `config`, which may differ from the
    run's in what `trainer/fingerprint.py` leaves free.

    The interrupted stage goes on after its latest checkpoint, or after that of `step`, in which
    case later ones are set aside. Raises what `train` does, CheckpointError if the checkpoint is
    damaged or of another training, and RunBusy if the run is still going on.
    """
    inputs = check_inputs(config)
    check_machine(config)
    with run.lock("launcher"):
        for role in ("trainer", "controller"):
            with run.lock(role):  # what a killed launcher had started has ended too
                pass
        extend(config, run)
        stage = _unfinished(config, run)
        if stage is not None:
            _check_checkpoint(config, run, stage, step, console)
        elif step is not None:
            raise CheckpointError(
                f"{run.root}: every stage has ended, none goes back to step {step}"
            )
        run.replace_config(dump(config))
        run.verifier_socket.unlink(missing_ok=True)
        run.phase.unlink(missing_ok=True)
        _run_stages(config, run, inputs, console)


def open_run_folder(path: Path) -> RunFolder:
    """Raises Refused if no run was ever started there."""
    run = RunFolder(path.resolve())
    if not run.config.is_file():
        raise Refused(f"{path}: is no run folder: it has no {run.config.name}")
    return run


def extend(config: Config, run: RunFolder) -> None:
    """Reopens the last stage if it has ended and `config` asks for more steps than it had.

    Raises Refused for any other number of steps than that of a stage that has ended.
    """
    before = load(run.config)
    last = Stage.RL if config.rl is not None else Stage.SFT
    for stage in (Stage.SFT, Stage.RL):
        now, had = getattr(config, stage), getattr(before, stage)
        if not run.is_finished(stage) or now is None or now.num_steps == had.num_steps:
            continue
        if stage is not last or now.num_steps < had.num_steps:
            raise Refused(
                f"{stage}.num_steps = {now.num_steps}: the stage has ended after {had.num_steps} "
                "steps; only the last stage of a run can go on beyond its end"
            )
        run.reopen(stage)


def _unfinished(config: Config, run: RunFolder) -> Stage | None:
    """The first stage that has not ended."""
    stages = [Stage.PREPARE]
    if config.sft is not None:
        stages.append(Stage.SFT)
    if config.rl is not None:
        stages.append(Stage.RL)
    return next((stage for stage in stages if not run.is_finished(stage)), None)


def _check_checkpoint(
    config: Config, run: RunFolder, stage: Stage, step: int | None, console: Console
) -> None:
    """Say where the stage will go on. Raises CheckpointError if it cannot."""
    folder = CheckpointFolder(run.checkpoints(stage))
    folder.recover()
    if step is not None:
        folder.verify(step)
        if later := folder.go_back(step):
            steps = ", ".join(map(str, later))
            console.print(
                f"warning: {stage} goes back to step {step}; set aside: checkpoints of steps "
                f"{steps}. What was trained after step {step} is trained again.",
                style="yellow",
                highlight=False,
                soft_wrap=True,
            )
    latest = folder.latest()
    if latest is None:
        console.print(f"{stage} has no checkpoint yet and begins anew", highlight=False)
        return
    folder.verify(latest)
    folder.check_training(latest, training_values(config, stage))
    console.print(f"{stage} goes on after step {latest}", highlight=False)


def _run_stages(config: Config, run: RunFolder, inputs: Inputs, console: Console) -> None:
    """Every stage that has not ended yet, then the table."""
    for warning in inputs.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    console.print(f"run folder: {run.root}", highlight=False, soft_wrap=True)
    num_steps = {
        stage: section.num_steps
        for stage, section in (("sft", config.sft), ("rl", config.rl))
        if section is not None
    }
    view = RunView(console, run.metrics, num_steps, run.phase, since=time.time())
    with Supervisor() as supervisor, view:
        if not run.is_finished(Stage.PREPARE):
            view.phase("preparing data and model")
            supervisor.start(prepare_role(run))
            supervisor.wait_for(["prepare"], tick=view.refresh, timeout_s=PREPARE_TIMEOUT_S)
            run.mark_finished(Stage.PREPARE)
        if config.sft is not None and not run.is_finished(Stage.SFT):
            _run_stage(supervisor, view, sft_roles(config, run, free_ports(1)[0]), "SFT cold start")
            run.mark_finished(Stage.SFT)
        if config.rl is not None and not run.is_finished(Stage.RL):
            roles = rl_roles(config, run, Ports.choose(config), inputs.context_length)
            _run_stage(supervisor, view, roles, "RL: starting generators, verifiers and trainers")
            run.mark_finished(Stage.RL)
    if config.rl is not None:
        before, after = EvalReport.load(run.eval_before_rl), EvalReport.load(run.eval_after_rl)
        console.print(final_table(before, after))
    console.print(f"run folder: {run.root}", highlight=False, soft_wrap=True)


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
