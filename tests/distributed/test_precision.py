"""Training in bfloat16: what is kept in fp32, and that the loss follows that of fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.megatron import destroy_distributed, destroy_model_parallel
from megatron_magistral.trainer.objective import SupervisedObjective
from megatron_magistral.trainer.settings import OptimizerSettings
from megatron_magistral.trainer.step import Trainer
from tests.distributed.cases import share
from tests.distributed.ranks import run_ranks
from tests.trainer.models import hf_model, random_sequences, save

pytestmark = pytest.mark.distributed

SEQUENCES = random_sequences([(3, 12), (1, 30), (5, 20), (2, 33)])
NUM_STEPS = 12


def _dtypes(t: Trainer) -> dict[str, set[torch.dtype]]:
    buckets = [b for chunk in t.model.chunks for buffer in chunk.buffers for b in buffer.buckets]
    (optimizer,) = getattr(t.optimizer.inner, "chained_optimizers", [t.optimizer.inner])
    masters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    moments = [v for state in optimizer.optimizer.state.values() for v in state.values()]
    return {
        "weights": {p.dtype for _, p in t.model.named_parameters()},
        "gradients": {p.main_grad.dtype for _, p in t.model.named_parameters()},
        "reduced": {bucket.grad_data.dtype for bucket in buckets},
        "masters": {p.dtype for p in masters},
        "moments": {v.dtype for v in moments if torch.is_tensor(v)},
    }


def _train(hf_dir: Path) -> dict[torch.dtype, tuple[list[float], dict[str, set[torch.dtype]]]]:
    found: dict[Any, Any] = {}
    weight = 1.0 / sum(s.num_output_tokens for s in SEQUENCES)
    for dtype in (torch.float32, torch.bfloat16):
        settings = OptimizerSettings(lr=3e-3)
        layout = ParallelLayout(dp=2)
        t = Trainer.create(hf_dir, layout, settings, dtype=dtype, timeout_s=60)
        mine = share([replace(s, weight=weight) for s in SEQUENCES], t.mesh.dp_rank, 2)
        batches = t.pack(mine, 64)
        steps = [t.train_minibatch(batches, SupervisedObjective()) for _ in range(NUM_STEPS)]
        found[dtype] = ([step.loss for step in steps], _dtypes(t))
        destroy_model_parallel()
    destroy_distributed()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Any]:
    torch.manual_seed(0)
    hf_dir = save(hf_model("llama"), tmp_path_factory.mktemp("precision") / "model")
    return run_ranks(_train, 2, hf_dir)[0]


def test_only_the_weights_themselves_are_bfloat16(found: dict[torch.dtype, Any]) -> None:
    dtypes = found[torch.bfloat16][1]
    assert dtypes.pop("weights") == {torch.bfloat16}
    assert dtypes == {kind: {torch.float32} for kind in dtypes}


def test_the_loss_follows_that_of_fp32(found: dict[torch.dtype, Any]) -> None:
    fp32, bf16 = found[torch.float32][0], found[torch.bfloat16][0]
    assert fp32[-1] < fp32[0] - 0.5  # it has learned something
    assert bf16 == pytest.approx(fp32, rel=0.02)
