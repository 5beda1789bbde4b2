"""Every layout computes what `transformers` computes, and what every other layout computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.megatron import destroy_distributed
from megatron_magistral.types import TrainSequence
from tests.distributed.cases import Outcome, Reference, one_step, reference, relative_error
from tests.distributed.ranks import run_ranks
from tests.trainer.models import hf_model, random_sequences, save

pytestmark = pytest.mark.distributed

MODELS = {
    "llama": ("llama", False),
    "llama-tied": ("llama", True),
    "mistral": ("mistral", False),
    "qwen2-tied": ("qwen2", True),
    "qwen3": ("qwen3", False),
}

# (layout, token budget of a microbatch): the budget changes how sequences are cut.
CASES: dict[int, list[tuple[ParallelLayout, int]]] = {
    1: [(ParallelLayout(), 40), (ParallelLayout(), 64), (ParallelLayout(), 400)],
    2: [
        (ParallelLayout(tp=2), 64),
        (ParallelLayout(tp=2, sequence_parallel=False), 64),
        (ParallelLayout(pp=2), 64),
        (ParallelLayout(pp=2, vpp=2), 64),
        (ParallelLayout(dp=2), 40),
    ],
    4: [
        (ParallelLayout(tp=2, pp=2), 64),
        (ParallelLayout(tp=2, pp=2, vpp=2), 64),
        (ParallelLayout(tp=2, dp=2), 64),
        (ParallelLayout(pp=2, dp=2), 40),
        (ParallelLayout(tp=4), 64),
    ],
}

# An odd number, so that replicas differ in sequences and in microbatches.
SEQUENCES = random_sequences([(3, 12), (1, 30), (9, 1), (5, 20), (2, 33), (7, 4), (1, 9)])


def _all_outcomes(
    dirs: dict[str, Path], cases: list[tuple[ParallelLayout, int]], sequences: list[TrainSequence]
) -> dict[tuple[str, int], Outcome]:
    outcomes = {
        (name, case): one_step(hf_dir, layout, sequences, max_tokens)
        for name, hf_dir in dirs.items()
        for case, (layout, max_tokens) in enumerate(cases)
    }
    destroy_distributed()
    return outcomes


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Reference]]:
    root = tmp_path_factory.mktemp("models")
    found = {}
    for name, (family, tied) in MODELS.items():
        model = hf_model(family, tied=tied)
        found[name] = (save(model, root / name), reference(model, SEQUENCES))
    return found


@pytest.fixture(scope="module", params=CASES, ids=lambda n: f"{n}-ranks")
def outcomes(
    request: pytest.FixtureRequest, references: dict[str, tuple[Path, Reference]]
) -> list[tuple[str, Outcome, Reference]]:
    # Four ranks add combinations of layouts, not of families.
    names = MODELS if request.param < 4 else ("llama", "qwen2-tied")
    dirs = {name: references[name][0] for name in names}
    cases = CASES[request.param]
    results = run_ranks(_all_outcomes, request.param, dirs, cases, SEQUENCES, timeout_s=150)
    return [
        (f"{name} in {cases[case]}", outcome, references[name][1])
        for (name, case), outcome in results[0].items()
    ]


def test_logits_agree_with_transformers(outcomes: list[tuple[str, Outcome, Reference]]) -> None:
    for case, outcome, want in outcomes:
        assert (outcome.logits - want.logits).abs().max() < 1e-5, case


def test_loss_is_the_same_in_every_layout(outcomes: list[tuple[str, Outcome, Reference]]) -> None:
    for case, outcome, want in outcomes:
        for stats in outcome.stats:
            assert stats.loss == pytest.approx(want.loss, rel=1e-6), case


def test_gradient_is_the_same_in_every_layout(
    outcomes: list[tuple[str, Outcome, Reference]],
) -> None:
    for case, outcome, want in outcomes:
        assert outcome.gradients.keys() == want.gradients.keys(), case
        names = list(want.gradients)
        for name in names:
            assert relative_error(outcome.gradients[name], want.gradients[name]) < 5e-6, (
                case,
                name,
            )
        got, whole = (
            torch.cat([gradients[name].flatten().double() for name in names])
            for gradients in (outcome.gradients, want.gradients)
        )
        assert relative_error(got, whole) < 1e-6, case


def test_gradient_norm_is_that_of_the_whole_model(
    outcomes: list[tuple[str, Outcome, Reference]],
) -> None:
    for case, outcome, want in outcomes:
        norm = sum(g.square().sum() for g in want.gradients.values()).sqrt().item()
        for stats in outcome.stats:
            assert stats.grad_norm == pytest.approx(norm, rel=1e-6), case


def test_scores_are_the_log_probabilities_at_the_temperature(
    outcomes: list[tuple[str, Outcome, Reference]],
) -> None:
    for case, outcome, want in outcomes:
        for got, score in zip(outcome.scores, want.scores, strict=True):
            assert (got - score).abs().max() < 1e-5, case


def test_every_rank_reports_the_same_metrics(
    outcomes: list[tuple[str, Outcome, Reference]],
) -> None:
    for case, outcome, _ in outcomes:
        assert all(stats.metrics == outcome.stats[0].metrics for stats in outcome.stats), case
        assert outcome.stats[0].metrics["num_tokens"] == sum(
            s.num_output_tokens for s in SEQUENCES
        ), case
