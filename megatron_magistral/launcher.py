"""What `magistral train` does on one machine: prepare, SFT, RL, each stage with its processes.

prepare        makes the world and the initial model, where the config asks for them
sft            trainer ranks
selection      SGLang servers and verifier service, where pass@1 decides which weights of SFT stay
rl             trainer ranks, SGLang servers, verifier service, rollout controller

`magistral resume` does what is left of that: stages that have ended are not repeated, the one that
was interrupted goes on after its latest checkpoint. The trainers find that themselves; here it is
checked before anything starts.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from megatron_magistral.cluster import (
    RestartPolicy,
    Role,
    Supervisor,
    free_ports,
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
from megatron_magistral.restart_requests import RestartRequests
from megatron_magistral.role_commands import (
    controller_command,
    generator_settings,
    prepare_command,
    selection_command,
    trainer_command,
    verifier_command,
)
from megatron_magistral.rollout.journal import segments_of
from megatron_magistral.rollout.sglang_server import (
    Device,
    ServerSettings,
    detect_device,
    server_command,
    server_environment,
)
from megatron_magistral.run_folder import RunFolder, Stage, stages_of
from megatron_magistral.stopping import saving_when_stopped
from megatron_magistral.trainer.checkpoint_files import CheckpointError, CheckpointFolder
from megatron_magistral.trainer.fingerprint import differences, training_values

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

    @property
    def generator_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.generators]


def prepare_role(run: RunFolder) -> Role:
    return _role("prepare", prepare_command(run), run)


def sft_roles(config: Config, run: RunFolder, port: int) -> list[Role]:
    command = trainer_command(run, Stage.SFT)
    return trainer_roles(command, config.parallel.world_size, run.log, port=port)


def selection_roles(
    config: Config, run: RunFolder, ports: Ports, context_length: int
) -> list[Role]:
    """The trainers of SFT have ended: generators may have their GPUs."""
    services = _services(config, run, ports, context_length, first_gpu=0)
    return [*services, _role("selection", selection_command(run, ports.generator_urls), run)]


def rl_roles(config: Config, run: RunFolder, ports: Ports, context_length: int) -> list[Role]:
    """Servers first: they take longest to start."""
    world_size = config.parallel.world_size
    # Trainer rank r has GPU r; generators have those after them.
    services = _services(config, run, ports, context_length, first_gpu=world_size)
    urls = ports.generator_urls
    controller = _role("controller", controller_command(run, ports.controller, urls), run)
    command = trainer_command(
        run, Stage.RL, controller=f"http://127.0.0.1:{ports.controller}", generators=urls
    )
    trainers = trainer_roles(command, world_size, run.log, port=ports.rendezvous)
    return [*services, controller, *trainers]


def _services(
    config: Config, run: RunFolder, ports: Ports, context_length: int, *, first_gpu: int
) -> list[Role]:
    """Generators and the verifier service."""
    generators = [
        Role(
            f"generator-{i}",
            tuple(server_command(settings)),
            run.log(f"generator-{i}"),
            server_environment(settings, os.environ),
            generator_restarts(config),
            address=f"{settings.host}:{settings.port}",
        )
        for i, settings in enumerate(
            _server_settings(config, run, ports, context_length, first_gpu)
        )
    ]
    verifier = replace(
        _role("verifier", verifier_command(config, "--socket", str(run.verifier_socket)), run),
        restarts=RestartPolicy(config.verifier.max_restarts),
    )
    return [*generators, verifier]


def generator_restarts(config: Config) -> RestartPolicy:
    """One that has ended comes back, and gets all weights before it serves; others go on."""
    recovery = config.generator.recovery
    return RestartPolicy(recovery.max_restarts, recovery.restart_backoff_s, pool="generators")


def planned_roles(config: Config, run: RunFolder, context_length: int) -> dict[str, list[Role]]:
    """Every process that `train` would start, by stage and in order; for `--dry-run`."""
    ports = Ports.choose(config)
    stages = {"prepare": [prepare_role(run)]}
    if config.sft is not None:
        stages["sft"] = sft_roles(config, run, ports.rendezvous)
    if config.selects:
        stages["selection"] = selection_roles(config, run, ports, context_length)
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
        reopen(config, run, console, step=step)
        _run_stages(config, run, inputs, console)


def reopen(
    config: Config,
    run: RunFolder,
    console: Console,
    *,
    step: int | None = None,
    sizes_only: bool = False,
) -> None:
    """Make an interrupted run ready to go on with `config`. Raises what `resume` does of it.

    With `sizes_only` a checkpoint is not read here: trainers read theirs in parallel.
    """
    for role in ("trainer", "controller", "selection"):
        with run.lock(role):  # what a killed launcher had started has ended too
            pass
    extend(config, run)
    stage = unfinished_stage(config, run)
    if stage is not None:
        _check_checkpoint(config, run, stage, step, console, sizes_only=sizes_only)
    elif step is not None:
        raise CheckpointError(f"{run.root}: every stage has ended, none goes back to step {step}")
    run.replace_config(dump(config))
    run.verifier_socket.unlink(missing_ok=True)
    run.phase.unlink(missing_ok=True)
    run.stop_requested.unlink(missing_ok=True)


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
    before = load(run.config, check_files=False)
    last = Stage.RL if config.rl is not None else Stage.SFT
    for stage in (Stage.SFT, Stage.RL):
        now, had = getattr(config, stage), getattr(before, stage)
        if not run.is_finished(stage) or now is None or now.length == had.length:
            continue
        (key, length), (had_key, had_length) = now.length, had.length
        if stage is not last or key != had_key or length < had_length:
            raise Refused(
                f"{stage}.{key} = {length}: the stage has ended after {had_length} "
                f"{had_key.removeprefix('num_')}; only the last stage of a run can go on beyond "
                "its end"
            )
        run.reopen(stage)
        if stage is Stage.SFT and run.is_finished(Stage.SELECTION):
            run.reopen(Stage.SELECTION)


def unfinished_stage(config: Config, run: RunFolder) -> Stage | None:
    """The first stage that has not ended."""
    return next((stage for stage in stages_of(config) if not run.is_finished(stage)), None)


def _check_checkpoint(
    config: Config,
    run: RunFolder,
    stage: Stage,
    step: int | None,
    console: Console,
    *,
    sizes_only: bool,
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
    if stage is Stage.SELECTION:
        of = len(run.sft_candidates())
        console.print(f"selection goes on: {run.num_measured} of {of} candidates are measured")
        return
    if latest is None:
        _check_journal(config, run, stage)
        console.print(f"{stage} has no checkpoint yet and begins anew", highlight=False)
        return
    folder.verify(latest, sizes_only=sizes_only)
    folder.check_training(latest, training_values(config, stage))
    if stage is Stage.RL and config.rl is not None and config.rl.num_steps < latest:
        raise CheckpointError(
            f"rl.num_steps = {config.rl.num_steps}: must be at least the {latest} steps that are "
            f"trained already{folder.hint(latest)}"
        )
    console.print(f"{stage} goes on after step {latest}", highlight=False)


def _check_journal(config: Config, run: RunFolder, stage: Stage) -> None:
    """A stage of RL that has no checkpoint yet goes on with the groups that were begun for it.

    Raises CheckpointError if these are of another training.
    """
    if stage is not Stage.RL or not segments_of(run.journal):
        return
    before = load(run.config, check_files=False)
    changed = differences(training_values(before, stage), training_values(config, stage))
    if changed:
        raise CheckpointError(
            f"{run.journal}: holds groups of another training: {'; '.join(changed)}. To go on, put "
            "these back; to train with them, start a new run"
        )


def _run_stages(config: Config, run: RunFolder, inputs: Inputs, console: Console) -> None:
    """Every stage that has not ended yet, then the table."""
    for warning in inputs.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    console.print(f"run folder: {run.root}", highlight=False, soft_wrap=True)
    num_steps = {
        stage: section.num_steps
        for stage, section in (("sft", config.sft), ("rl", config.rl))
        if section is not None and section.num_steps is not None
    }
    view = RunView(console, run.metrics, num_steps, run.phase, since=time.time())

    def say(line: str) -> None:
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)

    requests = RestartRequests(run.restarts)
    grace_s = config.checkpoint.grace_s
    with (
        Supervisor(requests=requests, say=say) as supervisor,
        view,
        saving_when_stopped(supervisor, run, grace_s),
    ):
        if not run.is_finished(Stage.PREPARE):
            view.phase("preparing data and model")
            supervisor.start(prepare_role(run))
            supervisor.wait_for(["prepare"], tick=view.refresh, timeout_s=PREPARE_TIMEOUT_S)
            run.mark_finished(Stage.PREPARE)
        if config.sft is not None and not run.is_finished(Stage.SFT):
            _run_stage(supervisor, view, sft_roles(config, run, free_ports(1)[0]), "SFT cold start")
            run.mark_finished(Stage.SFT)
        if config.selects and not run.is_finished(Stage.SELECTION):
            roles = selection_roles(config, run, Ports.choose(config), inputs.context_length)
            _run_stage(supervisor, view, roles, "measuring which weights of SFT are best")
            run.mark_finished(Stage.SELECTION)
            chosen = json.loads(run.sft_selected.read_text(encoding="utf-8"))
            view.phase(
                "SFT: kept the weights after {step} steps, pass@1 {pass_at_1:.3f}".format(**chosen)
            )
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
    ending = ("trainer", "controller", "selection")
    finishing = [role.name for role in roles if role.name.startswith(ending)]
    supervisor.wait_for(finishing, tick=view.refresh)
    view.refresh()
    supervisor.stop_all()


def _server_settings(
    config: Config, run: RunFolder, ports: Ports, context_length: int, first_gpu: int
) -> list[ServerSettings]:
    tp, on_gpus = config.generator.tensor_parallel, detect_device() is Device.CUDA
    return [
        generator_settings(
            config,
            run,
            port=port,
            context_length=context_length,
            base_gpu_id=first_gpu + index * tp if on_gpus else None,
        )
        for index, port in enumerate(ports.generators)
    ]


def _role(name: str, command: tuple[str, ...], run: RunFolder) -> Role:
    return Role(name, command, run.log(name), dict(os.environ))
