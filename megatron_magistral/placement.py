"""Which role runs on which node and GPU. Pure; `--dry-run` prints it, launch scripts follow it.

    node 0: controller, verifier, trainer 0 1 2 3 4 5 6 7
    node 1:             verifier, trainer 8 9 10 11 12 13 14 15
    node 2:             verifier, generator 0 (4 GPUs), generator 1 (4 GPUs)

Trainer ranks come first, on consecutive GPUs, then the generators. A tensor-parallel group, of
trainers or of a generator, never spans two nodes: its all-reduces need the links within a node.
Where a generator does not fit into what is left of a node, it begins on the next one.

Where there are no GPUs, read "places for a process" for "GPUs".
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_magistral.config import Config

CONTROLLER_NODE = 0


class PlacementError(ValueError):
    """The roles do not fit the nodes; names the key, the value and what would be right."""


@dataclass(frozen=True, order=True)
class Gpu:
    """Both count from 0."""

    node: int
    index: int


@dataclass(frozen=True)
class Replica:
    """One generator: a server on one node; tensor-parallel rank r has `gpus[r]`."""

    index: int
    gpus: tuple[Gpu, ...]

    @property
    def node(self) -> int:
        return self.gpus[0].node


@dataclass(frozen=True)
class Placement:
    """Where everything of a run is. Trainer rank r has `trainers[r]`."""

    nodes: int
    gpus_per_node: int
    trainers: tuple[Gpu, ...]
    generators: tuple[Replica, ...]
    verifier_nodes: tuple[int, ...]
    controller_node: int = CONTROLLER_NODE

    @property
    def num_idle_gpus(self) -> int:
        # In a run of SFT, generators have the trainers' GPUs when these are done.
        used = {*self.trainers, *(gpu for replica in self.generators for gpu in replica.gpus)}
        return self.nodes * self.gpus_per_node - len(used)

    def trainer_ranks(self, node: int) -> tuple[int, ...]:
        return tuple(rank for rank, gpu in enumerate(self.trainers) if gpu.node == node)

    def generators_on(self, node: int) -> tuple[Replica, ...]:
        return tuple(replica for replica in self.generators if replica.node == node)

    @property
    def trainer_nodes(self) -> tuple[int, ...]:
        return tuple(sorted({gpu.node for gpu in self.trainers}))

    @property
    def generator_nodes(self) -> tuple[int, ...]:
        return tuple(sorted({replica.node for replica in self.generators}))


def place_roles(config: Config, nodes: int, gpus_per_node: int = 8) -> Placement:
    """Places the roles of every stage of `config`; without an rl stage there are only trainers.

    Raises PlacementError with everything that does not fit.
    """
    num_trainers = config.parallel.world_size
    generates = config.rl is not None or config.selects
    num_replicas = config.generator.num_replicas if generates else 0
    # In a run of SFT alone, generators come when the trainers have ended.
    first = num_trainers if config.rl is not None else 0
    replica_size = config.generator.tensor_parallel
    problems = _problems(config, nodes, gpus_per_node)
    if problems:
        raise PlacementError("; ".join(problems))
    starts, end = _replica_starts(first, num_replicas, replica_size, gpus_per_node)
    end = max(end, num_trainers)
    needed = -(-end // gpus_per_node)
    if needed != nodes:
        raise PlacementError(_wrong_nodes(config, nodes, gpus_per_node, needed, end))

    def gpus(start: int, count: int) -> tuple[Gpu, ...]:
        return tuple(Gpu(*divmod(place, gpus_per_node)) for place in range(start, start + count))

    return Placement(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        trainers=gpus(0, num_trainers),
        generators=tuple(
            Replica(index, gpus(start, replica_size)) for index, start in enumerate(starts)
        ),
        verifier_nodes=tuple(range(nodes)) if num_replicas else (),
    )


def _problems(config: Config, nodes: int, gpus_per_node: int) -> list[str]:
    problems = [
        f"{name} = {value}: must be at least 1"
        for name, value in (("nodes", nodes), ("gpus per node", gpus_per_node))
        if value < 1
    ]
    if problems:
        return problems
    tensor, num_trainers = config.parallel.tensor, config.parallel.world_size
    if num_trainers > tensor and gpus_per_node % tensor:
        problems.append(
            f"parallel.tensor = {tensor} must divide the {gpus_per_node} GPUs of a node, or a "
            "tensor-parallel group would span two nodes"
        )
    elif tensor > gpus_per_node:
        problems.append(
            f"parallel.tensor = {tensor} must be at most the {gpus_per_node} GPUs of a node; "
            "divide the model further with parallel.pipeline"
        )
    if num_trainers > gpus_per_node and num_trainers % gpus_per_node:
        problems.append(
            f"the trainer's {num_trainers} ranks (tensor x pipeline x data) on more than one node "
            f"must be a multiple of the {gpus_per_node} GPUs of a node: "
            f"{_neighbours(num_trainers, gpus_per_node)}"
        )
    generates = config.rl is not None or config.selects
    if generates and config.generator.tensor_parallel > gpus_per_node:
        problems.append(
            f"generator.tensor_parallel = {config.generator.tensor_parallel} must be at most the "
            f"{gpus_per_node} GPUs of a node"
        )
    return problems


def _replica_starts(
    first: int, num_replicas: int, size: int, gpus_per_node: int
) -> tuple[list[int], int]:
    """The first place of every replica, and the place after the last one."""
    starts, place = [], first
    for _ in range(num_replicas):
        left_on_node = gpus_per_node - place % gpus_per_node
        if left_on_node < size:
            place += left_on_node
        starts.append(place)
        place += size
    return starts, place


def _wrong_nodes(config: Config, nodes: int, gpus_per_node: int, needed: int, end: int) -> str:
    num_trainers = config.parallel.world_size
    roles = f"{num_trainers} trainer ranks"
    if config.rl is not None:
        generator = config.generator
        roles += f" and {generator.num_replicas} generators of {generator.tensor_parallel} GPUs"
    if needed > nodes:
        return (
            f"nodes = {nodes} of {gpus_per_node} GPUs are too few: {roles} need {needed} nodes "
            f"({end} GPUs in order)"
        )
    message = f"nodes = {nodes}: {roles} fill {needed}, so {nodes - needed} would be idle"
    if config.rl is None:
        return message
    size = config.generator.tensor_parallel
    left_of_last = needed * gpus_per_node - end
    more = (nodes - needed) * (gpus_per_node // size) + left_of_last // size
    return f"{message}; use generator.num_replicas = {config.generator.num_replicas + more}"


def _neighbours(value: int, multiple: int) -> str:
    below = value // multiple * multiple
    return " or ".join(str(near) for near in (below, below + multiple) if near)
