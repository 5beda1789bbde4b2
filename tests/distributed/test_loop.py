"""Two optimizer steps on a batch: the switches of the algorithm, and a mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_magistral.config_stages import RlConfig
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.loop import train_batch
from megatron_magistral.trainer.megatron import destroy_distributed
from megatron_magistral.trainer.step import StepStats, StepStatus
from megatron_magistral.types import Batch, Minibatch
from tests.distributed.cases import trainer
from tests.distributed.ranks import run_ranks
from tests.trainer.models import hf_model, random_sequences, save

pytestmark = pytest.mark.distributed

SEQUENCES = tuple(random_sequences([(3, 12), (1, 10), (5, 9), (2, 13)]))
BATCH = Batch(0, (Minibatch(SEQUENCES[:2], (0, 0)), Minibatch(SEQUENCES[2:], (0, 0))), ())
SWITCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "recompute": {"recompute_old_logprobs": True},
    "tis": {"recompute_old_logprobs": True, "tis_cap": 1e-6},
    "kl": {"kl_coef": 0.1, "ema_decay": 0.9},
}


def _config(**algorithm: Any) -> RlConfig:
    return RlConfig.model_validate(
        {
            "num_steps": 1,
            "group_size": 2,
            "n_batch": 4,
            "n_minibatch": 2,
            "n_async": 4,
            "microbatch_tokens": 64,
            "optimizer": {"lr": 1e-2},
            "algorithm": algorithm,
        }
    )


def _run(hf_dir: Path) -> dict[str, list[StepStats]]:
    found = {}
    for name, switches in SWITCHES.items():
        config = _config(**switches)
        settings = config.algorithm.settings(config.num_minibatches)
        decay = settings.ema_decay if settings.kl_coef > 0 else None
        with trainer(hf_dir, ParallelLayout(), ema_decay=decay) as t:
            found[name] = train_batch(t, BATCH, settings, config)
    destroy_distributed()
    return found


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[StepStats]]:
    torch.manual_seed(0)
    hf_dir = save(hf_model("llama"), tmp_path_factory.mktemp("loop") / "model")
    return run_ranks(_run, 1, hf_dir)[0]


def test_the_ratio_is_to_the_generators_record_by_default(stats):
    first, _ = stats["none"]
    assert first.metrics["ratio"] != pytest.approx(1.0, abs=1e-2)


def test_recomputed_log_probabilities_are_those_before_the_first_step_of_the_batch(stats):
    first, second = stats["recompute"]
    assert first.metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert second.metrics["ratio"] != pytest.approx(1.0, abs=1e-4)


def test_the_gap_to_the_generator_is_reported_whatever_the_ratio_is_to(stats):
    gaps = [stats[name][0].metrics["generator_log_ratio_abs"] for name in ("none", "recompute")]
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-4)
    assert gaps[0] > 0.05


def test_a_truncated_importance_weight_scales_the_gradient(stats):
    plain, truncated = stats["recompute"][0], stats["tis"][0]
    assert 0 < truncated.grad_norm < 1e-3 * plain.grad_norm


def test_the_average_is_that_before_the_first_step_of_the_batch(stats):
    first, second = stats["kl"]
    assert first.metrics["kl_ema"] == pytest.approx(0.0, abs=1e-6)
    assert second.metrics["kl_ema"] > 1e-6


def _run_experts(hf_dir: Path) -> list[tuple[list[StepStats], dict[str, Tensor]]]:
    """The batch on two replicas, with each layer's experts on both, and spread over them."""
    config = _config(recompute_old_logprobs=True)
    settings = config.algorithm.settings(config.num_minibatches)
    found = []
    for layout in (ParallelLayout(dp=2), ParallelLayout(dp=2, ep=2)):
        with trainer(hf_dir, layout) as t:
            mine = tuple(
                Minibatch((minibatch.sequences[t.mesh.dp_rank],), (t.mesh.dp_rank,))
                for minibatch in BATCH.minibatches
            )
            stats = train_batch(t, Batch(0, mine, ()), settings, config)
            weights = {name: w.clone() for b in t.named_hf_buckets(1 << 30) for name, w in b}
            found.append((stats, weights))
    destroy_distributed()
    return found


def test_a_batch_trains_spread_experts_as_it_trains_whole_ones(tmp_path: Path) -> None:
    hf_dir = save(hf_model("qwen3_moe"), tmp_path / "model")
    before = load_file(hf_dir / "model.safetensors")
    for (whole, want), (spread, got) in run_ranks(_run_experts, 2, hf_dir):
        assert [s.status for s in spread] == [StepStatus.UPDATED] * 2
        for mine, other in zip(spread, whole, strict=True):
            assert mine.metrics == pytest.approx(other.metrics, rel=1e-4, abs=1e-6)
            assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
        assert got.keys() == want.keys() == before.keys()
        for name, w in want.items():
            # Steps of 1e-2, whatever the gradient: rounding may turn those of the tiniest.
            assert (got[name] - w).abs().mean() < 1e-6, name
            assert (w - before[name]).abs().mean() > 1e-3, name
