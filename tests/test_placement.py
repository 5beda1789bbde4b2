"""Where roles go: trainers first, tensor-parallel groups on one node, and errors that name keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magistral.config import Config
from megatron_magistral.config_file import load
from megatron_magistral.placement import Gpu, Placement, PlacementError, place_roles

TINY = load(Path(__file__).parents[1] / "configs" / "tiny.yaml")


def _config(
    *, tensor: int = 1, pipeline: int = 1, data: int = 1, replicas: int = 1, generator_tp: int = 1
) -> Config:
    """The tiny config with other numbers of ranks; what they mean to its model does not matter."""
    parallel = TINY.parallel.model_copy(
        update={"tensor": tensor, "pipeline": pipeline, "data": data}
    )
    generator = TINY.generator.model_copy(
        update={"num_replicas": replicas, "tensor_parallel": generator_tp}
    )
    return TINY.model_copy(update={"parallel": parallel, "generator": generator})


def _all_gpus(placement: Placement) -> list[Gpu]:
    return [*placement.trainers, *(gpu for r in placement.generators for gpu in r.gpus)]


def test_trainers_come_first_and_generators_after_them() -> None:
    placement = place_roles(
        _config(tensor=4, pipeline=2, data=2, replicas=2, generator_tp=4), nodes=3
    )

    assert placement.trainers == tuple(Gpu(rank // 8, rank % 8) for rank in range(16))
    assert [replica.gpus[0] for replica in placement.generators] == [Gpu(2, 0), Gpu(2, 4)]
    assert placement.trainer_nodes == (0, 1)
    assert placement.generator_nodes == (2,)
    assert placement.controller_node == 0
    assert placement.verifier_nodes == (0, 1, 2)
    assert placement.num_idle_gpus == 0


@given(
    gpus_per_node=st.sampled_from([1, 2, 4, 6, 8]),
    tensor=st.sampled_from([1, 2, 3, 4, 8]),
    data=st.integers(1, 12),
    replicas=st.integers(1, 20),
    generator_tp=st.integers(1, 8),
    nodes=st.integers(1, 24),
)
def test_what_is_placed_is_placed_once_and_no_tensor_group_spans_nodes(
    gpus_per_node: int, tensor: int, data: int, replicas: int, generator_tp: int, nodes: int
) -> None:
    config = _config(tensor=tensor, data=data, replicas=replicas, generator_tp=generator_tp)
    try:
        placement = place_roles(config, nodes, gpus_per_node)
    except PlacementError:
        return
    gpus = _all_gpus(placement)
    assert len(gpus) == len(set(gpus)) == tensor * data + replicas * generator_tp
    assert gpus == sorted(gpus)
    assert all(0 <= gpu.node < nodes and 0 <= gpu.index < gpus_per_node for gpu in gpus)
    groups = [placement.trainers[i : i + tensor] for i in range(0, tensor * data, tensor)]
    groups += [replica.gpus for replica in placement.generators]
    assert all(len({gpu.node for gpu in group}) == 1 for group in groups)
    assert gpus[-1].node == nodes - 1  # no node is rented for nothing
    ranks = [rank for node in range(nodes) for rank in placement.trainer_ranks(node)]
    assert ranks == list(range(tensor * data))
    assert sum(len(placement.generators_on(node)) for node in range(nodes)) == replicas


def test_a_generator_that_does_not_fit_the_rest_of_a_node_begins_on_the_next() -> None:
    placement = place_roles(_config(tensor=2, replicas=3, generator_tp=4), nodes=2)

    assert [replica.gpus[0] for replica in placement.generators] == [
        Gpu(0, 2),
        Gpu(1, 0),
        Gpu(1, 4),
    ]
    assert placement.num_idle_gpus == 2


def test_without_an_rl_stage_there_are_only_trainers() -> None:
    config = _config(data=8, replicas=5).model_copy(update={"rl": None})

    placement = place_roles(config, nodes=1)

    assert len(placement.trainers) == 8
    assert placement.generators == ()
    assert placement.verifier_nodes == ()


@pytest.mark.parametrize(
    ("config", "nodes", "gpus_per_node", "words"),
    [
        (_config(tensor=3, data=4), 2, 8, ["parallel.tensor = 3", "8 GPUs of a node"]),
        (_config(tensor=16), 2, 8, ["parallel.tensor = 16", "parallel.pipeline"]),
        (_config(data=12), 2, 8, ["12 ranks", "8 or 16"]),
        (_config(generator_tp=16), 3, 8, ["generator.tensor_parallel = 16"]),
        (_config(data=8, replicas=9), 2, 8, ["nodes = 2", "too few", "need 3 nodes"]),
        (_config(data=8, replicas=7), 3, 8, ["1 would be idle", "generator.num_replicas = 16"]),
        (_config(), 0, 8, ["nodes = 0"]),
        (_config(), 1, 0, ["gpus per node = 0"]),
    ],
)
def test_roles_that_do_not_fit_are_an_error_that_names_the_key_and_what_would_be_right(
    config: Config, nodes: int, gpus_per_node: int, words: list[str]
) -> None:
    with pytest.raises(PlacementError) as error:
        place_roles(config, nodes, gpus_per_node)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(PlacementError) as error:
        place_roles(_config(tensor=3, data=4, generator_tp=9), 2, 8)
    assert "parallel.tensor" in str(error.value)
    assert "generator.tensor_parallel" in str(error.value)
