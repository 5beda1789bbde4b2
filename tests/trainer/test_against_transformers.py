"""Options that a released model may have, through the whole trainer, against `transformers`:
scaled RoPE beyond the context it scales, sliding windows, recomputed activations.

Each case packs sequences into one microbatch, and into one each: packing changes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_magistral.trainer.batch import PackedBatch
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.logprobs import Head
from megatron_magistral.trainer.megatron import destroy_distributed
from megatron_magistral.trainer.step import Trainer
from tests.distributed.cases import OBJECTIVE, gradients, relative_error, share, trainer
from tests.distributed.ranks import run_ranks
from tests.trainer.live_bytes import LiveBytes
from tests.trainer.models import hf_model, random_sequences, save

pytestmark = pytest.mark.distributed

ORIGINAL_CONTEXT = 16
# Longer than the original context by up to four times, and one within it.
SEQUENCES = random_sequences([(1, 63), (4, 40), (2, 9)])
NUM_TOKENS = sum(len(s.tokens) for s in SEQUENCES)

THETA = {"rope_theta": 1e2}
ROPE: dict[str, dict[str, Any]] = {
    "llama3": dict(
        rope_type="llama3",
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=ORIGINAL_CONTEXT,
    ),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL_CONTEXT),
    "linear": dict(rope_type="linear", factor=4.0),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (
            "llama",
            dict(max_position_embeddings=64, rope_parameters=rope | {"rope_theta": 1e2}),
        )
        for name, rope in ROPE.items()
    },
    # As Mistral-7B-v0.1: on every layer, and shorter than the sequences.
    "window": ("mistral", dict(sliding_window=7)),
    "no-window": ("mistral", dict(sliding_window=None)),
}


def _logits(t: Trainer, max_tokens: int) -> list[Tensor]:
    """Of every output token, by sequence; `max_tokens` says how sequences are packed."""

    def project(hidden_RH: Tensor, head: Head, batch: PackedBatch) -> Tensor:
        return hidden_RH @ head.weight_VH.T

    found = []
    for part in [SEQUENCES] if max_tokens >= NUM_TOKENS else [[s] for s in SEQUENCES]:
        (rows,) = t.model.forward(t.pack(part, max_tokens), project)
        # Collation sorts by length, in which SEQUENCES are already.
        found += rows.split([s.num_output_tokens for s in part])
    return [rows.clone() for rows in found]


def _all_logits(dirs: dict[str, Path]) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    found = {}
    for name, hf_dir in dirs.items():
        with trainer(hf_dir, ParallelLayout()) as t:
            found[name] = (_logits(t, NUM_TOKENS), _logits(t, 64))
    destroy_distributed()
    return found


@pytest.fixture(scope="module")
def logits(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """(packed, one by one, of transformers in float64) of every model."""
    root = tmp_path_factory.mktemp("models")
    models = {name: hf_model(family, **options) for name, (family, options) in MODELS.items()}
    dirs = {name: save(model, root / name) for name, model in models.items()}
    ours = run_ranks(_all_logits, 1, dirs)[0]
    return {name: (*ours[name], _reference(models[name])) for name in MODELS}


@torch.no_grad()
def _reference(model: Any) -> list[Tensor]:
    model = model.double()
    return [
        model(torch.tensor(s.tokens)[None]).logits[0, s.num_prompt_tokens - 1 : -1]
        for s in SEQUENCES
    ]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, logits: Any) -> None:
    packed, _, want = logits[name]
    for got, expected in zip(packed, want, strict=True):
        assert (got - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_are_as_if_alone(name: str, logits: Any) -> None:
    packed, alone, _ = logits[name]
    for got, expected in zip(packed, alone, strict=True):
        assert (got - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ROPE)
def test_scaling_makes_a_difference(name: str, logits: Any) -> None:
    """Else the tests above would pass with the option ignored on both sides."""
    plain = hf_model("llama", max_position_embeddings=64)
    plain.model.rotary_emb.inv_freq = 1e2 ** -(torch.arange(0, 8, 2) / 8)
    for got, other in zip(logits[name][0], _reference(plain), strict=True):
        assert (got - other).abs().max() > 1e-2


def test_a_window_makes_a_difference(logits: Any) -> None:
    windowed, whole = logits["window"][0], logits["no-window"][0]
    for got, other in zip(windowed, whole, strict=True):
        torch.testing.assert_close(got[:2], other[:2], rtol=0, atol=1e-5)
        assert (got[-1] - other[-1]).abs().max() > 1e-2


def _steps(hf_dir: Path, layout: ParallelLayout) -> list[tuple[float, dict[str, Tensor], int]]:
    """Loss, gradients and bytes of activations, without and with recomputation."""

    def loss(hidden_RH: Tensor, head: Head, batch: PackedBatch) -> tuple[Tensor, None]:
        return OBJECTIVE.loss(*head.score(hidden_RH, batch.targets_R, 1.0), batch).loss, None

    found = []
    for recompute in (False, True):
        with trainer(hf_dir, layout, recompute=recompute) as t:
            mine = share(SEQUENCES, t.mesh.dp_rank, t.mesh.dp_size)
            batches = t.pack(mine, 64)
            stats = t.train_minibatch(batches, OBJECTIVE)
            step_gradients = gradients(t)
            parameters = [p for _, p in t.model.named_parameters()]
            with LiveBytes([*parameters, *(p.main_grad for p in parameters)]) as live:
                t.model.forward_backward(batches, loss)
            found.append((stats.loss, step_gradients, live.peak))
    destroy_distributed()
    return found


@pytest.mark.parametrize(
    ("family", "layout"),
    [("mistral", ParallelLayout()), ("mixtral", ParallelLayout(dp=2, ep=2))],
    ids=["dense", "experts"],
)
def test_recomputed_activations_change_neither_loss_nor_gradient(
    tmp_path: Path, family: str, layout: ParallelLayout
) -> None:
    hf_dir = save(hf_model(family), tmp_path / "model")
    results = run_ranks(_steps, layout.world_size, hf_dir, layout)
    (loss, kept, peak), (loss_again, recomputed, peak_again) = results[0]
    assert loss_again == pytest.approx(loss, rel=1e-7)
    for name, gradient in kept.items():
        assert relative_error(recomputed[name], gradient) < 1e-7, name
    assert peak_again < 0.6 * peak  # else nothing was recomputed
