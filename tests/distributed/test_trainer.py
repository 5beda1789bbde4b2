"""The trainer over several ranks: optimizer steps, weights in and out, the moving average."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.megatron import destroy_distributed, destroy_model_parallel
from megatron_magistral.trainer.settings import OptimizerSettings, Schedule
from megatron_magistral.trainer.step import StepStats, StepStatus, Trainer
from megatron_magistral.weights.hf_dir import WeightsError
from tests.distributed.cases import OBJECTIVE, reference, relative_error, share, trainer
from tests.distributed.ranks import run_ranks
from tests.trainer.live_bytes import LiveBytes
from tests.trainer.models import by_checkpoint_name, hf_model, random_sequences, save

pytestmark = pytest.mark.distributed

LAYOUTS = [ParallelLayout(tp=2), ParallelLayout(pp=2), ParallelLayout(dp=2)]
EXPERT_LAYOUTS = [ParallelLayout(dp=2, ep=2), ParallelLayout(tp=2, ep=2), ParallelLayout(tp=2)]
SEQUENCES = random_sequences([(3, 12), (1, 30), (5, 20), (2, 33), (1, 9)])
ADAM = OptimizerSettings(
    lr=1e-2,
    min_lr=1e-3,
    schedule=Schedule.COSINE,
    warmup_steps=2,
    total_steps=5,
    weight_decay=0.1,
    clip_grad=0.5,
)
LEARNING_RATES = [5e-3, 1e-2, 7.75e-3, 3.25e-3, 1e-3]


def _trainer(hf_dir: Path, layout: ParallelLayout, dtype: torch.dtype, **options: Any) -> Trainer:
    return Trainer.create(hf_dir, layout, ADAM, dtype=dtype, timeout_s=60, **options)


def _full_weights(t: Trainer, bucket_bytes: int = 1 << 30) -> dict[str, Tensor]:
    return {name: w.clone() for bucket in t.named_hf_buckets(bucket_bytes) for name, w in bucket}


def _train(
    hf_dir: Path, layouts: list[ParallelLayout], dtype: torch.dtype, num_steps: int
) -> list[tuple[list[StepStats], dict[str, Tensor]]]:
    found = []
    for layout in layouts:
        t = _trainer(hf_dir, layout, dtype)
        batches = t.pack(share(SEQUENCES, t.mesh.dp_rank, t.mesh.dp_size), 64)
        stats = [t.train_minibatch(batches, OBJECTIVE) for _ in range(num_steps)]
        found.append((stats, _full_weights(t)))
        destroy_model_parallel()
    destroy_distributed()
    return found


def _train_with_torch(model: Any, num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """AdamW of torch on the model of transformers, in float64."""
    model = model.double()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps)
    norms = []
    for lr in LEARNING_RATES[:num_steps]:
        reference(model, SEQUENCES)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.clip_grad).item())
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return norms, by_checkpoint_name(model.config.model_type, dict(model.named_parameters()))


@pytest.mark.parametrize(
    ("family", "tied", "layouts"),
    [("qwen2", True, LAYOUTS), ("mixtral", False, EXPERT_LAYOUTS)],
    ids=["dense", "experts"],
)
def test_optimizer_steps_are_those_of_torch_adamw(
    tmp_path: Path, family: str, tied: bool, layouts: list[ParallelLayout]
) -> None:
    model = hf_model(family, tied=tied)
    hf_dir = save(model, tmp_path / "model")
    norms, weights = _train_with_torch(model, num_steps=5)
    for stats, trained in run_ranks(_train, 2, hf_dir, layouts, torch.float32, 5)[0]:
        assert [s.status for s in stats] == [StepStatus.UPDATED] * 5
        assert [s.lr for s in stats] == pytest.approx(LEARNING_RATES)
        assert [s.grad_norm for s in stats] == pytest.approx(norms, rel=1e-4)
        for name, w in trained.items():
            torch.testing.assert_close(w.double(), weights[name], rtol=1e-3, atol=2e-4, msg=name)


def _drift(
    hf_dir: Path, layouts: list[ParallelLayout], dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """How far 8 steps of a tiny learning rate move the weights."""
    found = []
    for layout in layouts:
        settings = OptimizerSettings(lr=1e-4)
        t = Trainer.create(hf_dir, layout, settings, dtype=dtype, timeout_s=60)
        batches = t.pack(share(SEQUENCES, t.mesh.dp_rank, t.mesh.dp_size), 64)
        before = _full_weights(t)
        for _ in range(8):
            t.train_minibatch(batches, OBJECTIVE)
        found.append({name: w.float() - before[name] for name, w in _full_weights(t).items()})
        destroy_model_parallel()
    destroy_distributed()
    return found


@pytest.mark.parametrize(
    ("family", "layouts", "name"),
    [
        pytest.param("llama", LAYOUTS, "mlp.up_proj", id="dense"),
        pytest.param(
            "mixtral",
            EXPERT_LAYOUTS,
            "block_sparse_moe.experts.1.w3",
            id="experts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_steps_below_the_spacing_of_bfloat16_add_up(
    tmp_path: Path, family: str, layouts: list[ParallelLayout], name: str
) -> None:
    """Weights of 0.05 are 2.4e-4 apart in bfloat16: without fp32 masters they would not move."""
    model = hf_model(family).bfloat16().float()
    hf_dir = save(model, tmp_path / "model")
    name = f"model.layers.1.{name}.weight"
    exact = run_ranks(_drift, 2, hf_dir, layouts, torch.float32)[0]
    rounded = run_ranks(_drift, 2, hf_dir, layouts, torch.bfloat16)[0]
    for moved, want in zip(rounded, exact, strict=True):
        assert want[name].abs().mean() > 2e-4
        assert relative_error(moved[name], want[name]) < 0.5


def _export(
    hf_dir: Path, layouts: list[ParallelLayout], target: Path, bucket_bytes: int
) -> list[tuple[int, dict[str, Tensor], int]]:
    """Number of buckets, what was in them, and the most bytes that a save had in memory."""
    found = []
    for number, layout in enumerate(layouts):
        with trainer(hf_dir, layout) as t:
            buckets = list(t.named_hf_buckets(bucket_bytes))
            weights = {n: w.clone() for bucket in buckets for n, w in bucket}
            with LiveBytes(p.data for _, p in t.model.named_parameters()) as live:
                t.save_hf(target / str(number), bucket_bytes=bucket_bytes)
            found.append((len(buckets), weights, live.peak))
    destroy_distributed()
    return found


@pytest.mark.parametrize(
    ("family", "tied", "layouts"),
    [
        ("qwen2", True, [*LAYOUTS, ParallelLayout(pp=2, vpp=2)]),
        ("qwen3", False, LAYOUTS),
        ("qwen2_moe", True, EXPERT_LAYOUTS),
    ],
    ids=["tied", "untied", "experts"],
)
def test_weights_come_out_as_they_went_in_on_every_rank(
    tmp_path: Path, family: str, tied: bool, layouts: list[ParallelLayout]
) -> None:
    model = hf_model(family, tied=tied)
    hf_dir = save(model, tmp_path / "model")
    expected = by_checkpoint_name(family, dict(model.named_parameters()))  # tied: no copy
    bucket_bytes = 60_000
    largest = max(w.nbytes for w in expected.values())
    sum_of_bytes = sum(w.nbytes for w in expected.values())
    for results in run_ranks(_export, 2, hf_dir, layouts, tmp_path, bucket_bytes):
        for num_buckets, weights, peak_bytes in results:
            assert num_buckets > 5
            # Tensors are put together by way of a scratch, and a thread of gloo may not have let go
            # of the bucket before.
            assert peak_bytes <= 2 * bucket_bytes + 2 * largest < sum_of_bytes / 2
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], w) for name, w in expected.items())
    tokens = torch.arange(20)[None]
    for number in range(len(layouts)):
        saved = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / str(number), dtype=torch.float32, attn_implementation="eager"
        )
        assert torch.equal(saved(tokens).logits, model(tokens).logits)


def test_a_save_holds_one_bucket_at_a_time(tmp_path: Path) -> None:
    """On one rank, where nothing but the save itself could hold another."""
    hf_dir = save(hf_model("llama"), tmp_path / "model")
    bucket_bytes = 40_000  # the largest tensor has 33_536
    ((_, _, peak_bytes),) = run_ranks(
        _export, 1, hf_dir, [ParallelLayout()], tmp_path, bucket_bytes
    )[0]
    assert 33_536 <= peak_bytes <= bucket_bytes


def _average(hf_dir: Path) -> list[tuple[bool, float]]:
    found = []
    for layout in LAYOUTS:
        t = _trainer(hf_dir, layout, torch.float32, ema_decay=0.75)
        batches = t.pack(share(SEQUENCES, t.mesh.dp_rank, t.mesh.dp_size), 64)
        expected = [p.detach().clone() for _, p in t.model.named_parameters()]
        for _ in range(3):
            t.train_minibatch(batches, OBJECTIVE)
            expected = [
                0.75 * e + 0.25 * p.detach()
                for e, (_, p) in zip(expected, t.model.named_parameters(), strict=True)
            ]
        before = [p.detach().clone() for _, p in t.model.named_parameters()]
        assert t.average is not None
        with t.average.swapped_in():
            error = max(
                (e - p).abs().max().item()
                for e, (_, p) in zip(expected, t.model.named_parameters(), strict=True)
            )
        after = [p for _, p in t.model.named_parameters()]
        restored = all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        found.append((restored, error))
        destroy_model_parallel()
    destroy_distributed()
    return found


def test_the_average_of_the_weights_swaps_in_and_out(tmp_path: Path) -> None:
    hf_dir = save(hf_model("llama"), tmp_path / "model")
    for results in run_ranks(_average, 2, hf_dir):
        for restored, error in results:
            assert restored
            assert error < 1e-6


def _step_on_infinity(hf_dir: Path) -> list[tuple[StepStats, bool, StepStats]]:
    """Of several replicas only the last one sees it."""
    found = []
    for layout in LAYOUTS:
        t = _trainer(hf_dir, layout, torch.float32)
        sequences = share(SEQUENCES, t.mesh.dp_rank, t.mesh.dp_size)
        (first, *rest) = t.pack(sequences, 64)
        factor = float("inf") if t.mesh.dp_rank == t.mesh.dp_size - 1 else 1.0
        bad = dataclasses.replace(first, weights_R=first.weights_R * factor)
        before = _full_weights(t)
        skipped = t.train_minibatch([bad, *rest], OBJECTIVE)
        after = _full_weights(t)
        unchanged = all(torch.equal(after[name], w) for name, w in before.items())
        found.append((skipped, unchanged, t.train_minibatch([first, *rest], OBJECTIVE)))
        destroy_model_parallel()
    destroy_distributed()
    return found


def test_a_step_that_is_not_finite_on_one_replica_changes_nothing_on_any(tmp_path: Path) -> None:
    hf_dir = save(hf_model("llama"), tmp_path / "model")
    for results in run_ranks(_step_on_infinity, 2, hf_dir):
        for skipped, unchanged, next_step in results:
            assert skipped.status is StepStatus.NON_FINITE
            assert not math.isfinite(skipped.loss)
            assert unchanged
            assert next_step.status is StepStatus.UPDATED
            assert next_step.lr == pytest.approx(LEARNING_RATES[0])  # the schedule waited


def _create_with_missing_weights(hf_dir: Path) -> str:
    try:
        _trainer(hf_dir, LAYOUTS[0], torch.float32)
    except WeightsError as error:
        return str(error)
    return ""


def test_wrong_weights_are_refused_before_ranks_wait_for_each_other(tmp_path: Path) -> None:
    model = hf_model("llama")
    del model.model.layers[1].mlp.up_proj
    hf_dir = save(model, tmp_path / "model")
    for message in run_ranks(_create_with_missing_weights, 2, hf_dir):
        assert message == f"{hf_dir}: tensors missing: model.layers.1.mlp.up_proj.weight"
