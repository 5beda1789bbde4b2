"""One task of a step: says where it is, learns where the others are, and keeps its process alive.

    generator   publishes                                        waits for nobody
    verifier    publishes                                        waits for nobody
    controller  publishes     waits for generators, verifiers
    trainer     rank 0 does   waits for rank 0, controller, generators

Addresses are published before the processes start; that these answer is for the processes, which
wait for each other in bounded time, each with its own words.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_magistral.cluster import HUGE_PAGES, RestartPolicy, Role, free_ports
from megatron_magistral.config import Config
from megatron_magistral.launcher import generator_restarts
from megatron_magistral.role_commands import (
    controller_command,
    generator_settings,
    prepare_command,
    selection_command,
    trainer_command,
    verifier_command,
)
from megatron_magistral.rollout.sglang_server import server_command, server_environment
from megatron_magistral.run_folder import RunFolder, Stage
from megatron_magistral.slurm.address_book import AddressBook
from megatron_magistral.slurm.plan import JobPlan, RoleName, Task

SERVICES = frozenset({RoleName.GENERATOR, RoleName.VERIFIER})
"""They never end by themselves, and come back when they die. The other roles hold, or wait for, the
state of the step under way: where one of them dies, all go on from the checkpoint."""


@dataclass(frozen=True)
class Context:
    """What a task knows of its job. `host` is its node's address as the other nodes reach it."""

    config: Config
    run: RunFolder
    plan: JobPlan
    book: AddressBook
    stage: Stage
    host: str
    timeout_s: float
    environment: Mapping[str, str]

    def urls(self, role: RoleName) -> list[str]:
        return self.book.wait(role, len(self.plan.tasks[role]), self.timeout_s)

    def publish(self, role: RoleName, index: int, port: int = 0) -> int:
        """Choose a port, unless it is given, and let the others know. Returns the port."""
        port = port or free_ports(1, self.host)[0]
        self.book.publish(role, index, f"http://{self.host}:{port}")
        return port


def task_role(name: RoleName, index: int, context: Context) -> Role:
    """The process of task `index` of a role. Waits for the addresses that it needs.

    Raises AddressTimeout with those that do not come.
    """
    make = {
        RoleName.PREPARE: _prepare,
        RoleName.GENERATOR: _generator,
        RoleName.VERIFIER: _verifier,
        RoleName.CONTROLLER: _controller,
        RoleName.TRAINER: _trainer,
    }[name]
    task = context.plan.at(name, index)
    process = make(index, task, context)
    return Role(
        name=f"{name} {index} on {task.node}",
        command=process.command,
        log=context.run.log(f"{name}-{index}.{task.node}"),
        environment=process.environment,
        restarts=process.restarts,
        address=process.address,
    )


@dataclass(frozen=True)
class _Process:
    """What one role has and another has not."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    address: str = ""


def _prepare(index: int, task: Task, context: Context) -> _Process:
    return _Process(prepare_command(context.run), context.environment)


def _generator(index: int, task: Task, context: Context) -> _Process:
    config = context.config
    fixed_port = config.generator.port + index if config.generator.port else 0
    port = context.publish(RoleName.GENERATOR, index, fixed_port)
    settings = generator_settings(
        config,
        context.run,
        host=context.host,
        port=port,
        context_length=context.plan.context_length,
        base_gpu_id=task.place if context.plan.gpus_per_node else None,
    )
    return _Process(
        tuple(server_command(settings)),
        server_environment(settings, context.environment),
        generator_restarts(config),
        f"{context.host}:{port}",
    )


def _verifier(index: int, task: Task, context: Context) -> _Process:
    port = context.publish(RoleName.VERIFIER, index)
    return _Process(
        verifier_command(context.config, "--host", context.host, "--port", str(port)),
        context.environment,
        RestartPolicy(context.config.verifier.max_restarts),
    )


def _controller(index: int, task: Task, context: Context) -> _Process:
    """Of the RL stage; in the stage before it, what measures the weights of SFT."""
    if context.stage is Stage.SELECTION:
        generators, verifiers = context.urls(RoleName.GENERATOR), context.urls(RoleName.VERIFIER)
        command = selection_command(context.run, generators, verifiers=verifiers)
        return _Process(command, context.environment)
    port = context.publish(RoleName.CONTROLLER, index)
    command = controller_command(
        context.run,
        port,
        context.urls(RoleName.GENERATOR),
        host=context.host,
        verifiers=context.urls(RoleName.VERIFIER),
    )
    return _Process(command, context.environment)


def _trainer(index: int, task: Task, context: Context) -> _Process:
    """One rank, with the variables that torchrun sets too."""
    address, port = context.book.rendezvous(index, context.host, context.timeout_s)
    tasks = context.plan.tasks[RoleName.TRAINER]
    num_local = sum(each.node == task.node for each in tasks)
    # Ranks share the cores of a node; more threads than cores only slow each other down.
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_local))}
    ranks = {
        "RANK": str(index),
        "LOCAL_RANK": str(task.place),
        "LOCAL_WORLD_SIZE": str(num_local),
        "WORLD_SIZE": str(len(tasks)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    environment = HUGE_PAGES | threads | dict(context.environment) | ranks
    if context.stage is Stage.SFT:
        return _Process(trainer_command(context.run, Stage.SFT), environment)
    (controller,) = context.urls(RoleName.CONTROLLER)
    command = trainer_command(
        context.run,
        Stage.RL,
        host=context.host,
        controller=controller,
        generators=context.urls(RoleName.GENERATOR),
    )
    return _Process(command, environment)
