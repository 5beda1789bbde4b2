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

Step = tuple[list[int], StepStats]
"""Microbatches of each rank, and what the step says."""


def _steps(hf_dir: Path, layouts: list[ParallelLayout]) -> list[tuple[Step, Step]]:
    found = []
    for layout in layouts:
        steps = []
        for shares in (LOPSIDED, EVENER):
            with trainer(hf_dir, layout) as t:
                batches = t.pack(shares[t.mesh.dp_rank], MAX_TOKENS)
                counts = [0] * dist.get_world_size()
                dist.all_gather_object(counts, len(batches))
                steps.append((counts, t.train_minibatch(batches, OBJECTIVE)))
        found.append((steps[0], steps[1]))
    destroy_distributed()
    return found


CASES = {
    "dp": (ParallelLayout(dp=2), 2, [3, 1]),
    "pp-dp": (ParallelLayout(pp=2, dp=2), 4, [3, 1, 3, 1]),
}


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[int], list[tuple[Step, Step]]]:
    """(microbatches that each rank should have had, the two steps as each rank saw them)."""
    layout, num_ranks, counts = CASES[request.param]
    torch.manual_seed(0)
    hf_dir = save(hf_model("llama"), tmp_path_factory.mktemp("load") / "model")
    return counts, [steps for (steps,) in run_ranks(_steps, num_ranks, hf_dir, [layout])]


def test_replicas_may_differ_in_the_number_of_microbatches(case) -> None:
    counts, ranks = case
    for (found, stats), (_, evener) in ranks:
        assert found == counts
        assert stats.loss == pytest.approx(evener.loss, rel=1e-5)
        assert stats.grad_norm == pytest.approx(evener.grad_norm, rel=1e-5)


def test_load_imbalance_is_the_busiest_replica_over_the_mean(case) -> None:
    for (_, lopsided), (_, evener) in case[1]:
        assert lopsided.metrics["load_imbalance"] == pytest.approx(90 / 50)
        assert evener.metrics["load_imbalance"] == pytest.approx(60 / 50)


def test_load_imbalance_is_a_metric_of_the_run(case) -> None:
    (_, lopsided), _ = case[1][0]
    assert mean_step_metrics([lopsided], train_s=1.0)["load_imbalance"] == pytest.approx(1.8)
