"""Replicas with unequal work: no rank waits for ever, nothing is skewed, and it is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.loop import mean_step_metrics
from megatron_magistral.trainer.megatron import destroy_distributed
from megatron_magistral.trainer.step import StepStats
from megatron_magistral.types import TrainSequence
from tests.distributed.cases import OBJECTIVE, trainer
from tests.distributed.ranks import run_ranks
from tests.trainer.models import hf_model, random_sequences, save

pytestmark = pytest.mark.distributed

MAX_TOKENS = 40
SEQUENCES = random_sequences([(5, 25), (5, 25), (5, 25), (2, 8)])  # 30, 30, 30 and 10 tokens
LOPSIDED: tuple[list[TrainSequence], ...] = (SEQUENCES[:3], SEQUENCES[3:])
EVENER: tuple[list[TrainSequence], ...] = (SEQUENCES[:2], SEQUENCES[2:])
ON_ONE: tuple[list[TrainSequence], ...] = (SEQUENCES, [])

Step = tuple[list[int], StepStats]
"""Microbatches of each rank, and what the step says."""
Steps = tuple[Step, Step, Step]
"""Of LOPSIDED, EVENER and ON_ONE."""


def _steps(hf_dir: Path, layouts: list[ParallelLayout]) -> list[Steps]:
    found = []
    for layout in layouts:
        steps = []
        for shares in (LOPSIDED, EVENER, ON_ONE):
            with trainer(hf_dir, layout) as t:
                batches = t.pack(shares[t.mesh.dp_rank], MAX_TOKENS)
                counts = [0] * dist.get_world_size()
                dist.all_gather_object(counts, len(batches))
                steps.append((counts, t.train_minibatch(batches, OBJECTIVE)))
        found.append((steps[0], steps[1], steps[2]))
    destroy_distributed()
    return found


CASES: dict[str, tuple[list[ParallelLayout], list[int]]] = {
    "dp": ([ParallelLayout(dp=2)], [3, 1]),
    "pp-dp": ([ParallelLayout(pp=2, dp=2), ParallelLayout(pp=2, dp=2, vpp=2)], [3, 1, 3, 1]),
}


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[int], list[Steps]]:
    """(microbatches that each rank should have had when lopsided, the steps of every layout as
    each rank saw them)."""
    layouts, counts = CASES[request.param]
    torch.manual_seed(0)
    hf_dir = save(hf_model("llama"), tmp_path_factory.mktemp("load") / "model")
    ranks = run_ranks(_steps, layouts[0].world_size, hf_dir, layouts)
    return counts, [steps for rank in ranks for steps in rank]


def test_replicas_may_differ_in_the_number_of_microbatches(case) -> None:
    counts, ranks = case
    for (found, stats), (_, evener), _ in ranks:
        assert found == counts
        assert stats.loss == pytest.approx(evener.loss, rel=1e-6)
        assert stats.grad_norm == pytest.approx(evener.grad_norm, rel=1e-6)


def test_a_replica_may_have_no_sequences_at_all(case) -> None:
    for _, (_, evener), (found, stats) in case[1]:
        assert min(found) == 1  # of padding
        assert stats.loss == pytest.approx(evener.loss, rel=1e-6)
        assert stats.grad_norm == pytest.approx(evener.grad_norm, rel=1e-6)
        assert stats.metrics["load_imbalance"] == pytest.approx(2.0)


def test_load_imbalance_is_the_busiest_replica_over_the_mean(case) -> None:
    for (_, lopsided), (_, evener), _ in case[1]:
        assert lopsided.metrics["load_imbalance"] == pytest.approx(90 / 50)
        assert evener.metrics["load_imbalance"] == pytest.approx(60 / 50)


def test_load_imbalance_is_a_metric_of_the_run(case) -> None:
    (_, lopsided), *_ = case[1][0]
    assert mean_step_metrics([lopsided], train_s=1.0)["load_imbalance"] == pytest.approx(1.8)
