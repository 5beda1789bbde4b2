"""Every layout computes what `transformers` computes, and what every other layout computes.

More layouts of mixtures of experts, on two and four ranks:

    pytest -m slow tests/distributed/test_layouts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_magistral.algorithm.collate import collate
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.megatron import destroy_distributed
from megatron_magistral.types import TrainSequence
from tests.distributed.cases import (
    Outcome,
    Reference,
    one_step,
    reference,
    relative_error,
    share,
)
from tests.distributed.ranks import run_ranks
from tests.trainer.models import hf_model, random_sequences, save

pytestmark = pytest.mark.distributed

MODELS = {
    "llama": ("llama", False),
    "llama-tied": ("llama", True),
    "mistral": ("mistral", False),
    "qwen2-tied": ("qwen2", True),
    "qwen3": ("qwen3", False),
    "mixtral": ("mixtral", False),
    "qwen2_moe-tied": ("qwen2_moe", True),
    "qwen3_moe": ("qwen3_moe", False),
}
OPTIONS: dict[str, dict[str, Any]] = {
    # On the upper half of the layers alone: which these are must hold on every pipeline stage.
    "qwen2-tied": dict(use_sliding_window=True, sliding_window=8, max_window_layers=2),
}
DENSE = ("llama", "llama-tied", "mistral", "qwen2-tied", "qwen3")
EXPERTS = ("mixtral", "qwen2_moe-tied", "qwen3_moe")

Cases = list[tuple[ParallelLayout, int]]
"""(layout, token budget of a microbatch): the budget changes how sequences are cut."""

UNEVEN = 68
"""The budget at which one of two replicas needs two microbatches and the other one."""


@dataclass(frozen=True)
class Sweep:
    """These models in these layouts, all of `num_ranks` ranks."""

    num_ranks: int
    models: tuple[str, ...]
    cases: Cases


SWEEPS = {
    "1-ranks": Sweep(
        1, DENSE, [(ParallelLayout(), 40), (ParallelLayout(), 64), (ParallelLayout(), 400)]
    ),
    "2-ranks": Sweep(
        2,
        DENSE,
        [
            (ParallelLayout(tp=2), 64),
            (ParallelLayout(tp=2, sequence_parallel=False), 64),
            (ParallelLayout(pp=2), 64),
            (ParallelLayout(pp=2, vpp=2), 64),
            (ParallelLayout(dp=2), 40),
        ],
    ),
    # Four ranks add combinations of layouts, not of families.
    "4-ranks": Sweep(
        4,
        ("llama", "qwen2-tied"),
        [
            (ParallelLayout(tp=2, pp=2), 64),
            (ParallelLayout(tp=2, pp=2, vpp=2), 64),
            (ParallelLayout(tp=2, dp=2), 64),
            (ParallelLayout(pp=2, dp=2), 40),
            (ParallelLayout(tp=4), 64),
        ],
    ),
    "1-ranks-experts": Sweep(1, EXPERTS, [(ParallelLayout(), 40), (ParallelLayout(), 400)]),
    "2-ranks-experts": Sweep(
        2,
        ("mixtral", "qwen2_moe-tied"),
        [(ParallelLayout(dp=2, ep=2), UNEVEN), (ParallelLayout(tp=2, ep=2), 64)],
    ),
}
SLOW_SWEEPS = {
    "2-ranks-experts-not-spread": Sweep(
        2,
        EXPERTS,
        [
            (ParallelLayout(tp=2), 64),
            (ParallelLayout(pp=2), 64),
            (ParallelLayout(pp=2, vpp=2), 64),
            (ParallelLayout(dp=2), UNEVEN),
        ],
    ),
    "4-ranks-experts": Sweep(
        4,
        EXPERTS,
        [
            (ParallelLayout(pp=2, dp=2, ep=2), UNEVEN),
            (ParallelLayout(pp=2, dp=2, vpp=2, ep=2), UNEVEN),
            (ParallelLayout(tp=2, pp=2, ep=2), 64),
            (ParallelLayout(tp=2, dp=2, ep=2), UNEVEN),
            (ParallelLayout(tp=2, dp=2, ep=4), UNEVEN),
            (ParallelLayout(dp=4, ep=2), 40),
            (ParallelLayout(tp=2, dp=2), 64),
        ],
    ),
}

# An odd number, so that replicas differ in sequences and in microbatches.
SEQUENCES = random_sequences([(3, 12), (1, 30), (9, 1), (5, 20), (2, 33), (7, 4), (1, 9)])


def _all_outcomes(
    dirs: dict[str, Path], cases: Cases, sequences: list[TrainSequence]
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
        model = hf_model(family, tied=tied, **OPTIONS.get(name, {}))
        found[name] = (save(model, root / name), reference(model, SEQUENCES))
    return found


@pytest.fixture(
    scope="module",
    params=[*SWEEPS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_SWEEPS)],
)
def outcomes(
    request: pytest.FixtureRequest, references: dict[str, tuple[Path, Reference]]
) -> list[tuple[str, Outcome, Reference]]:
    sweep = (SWEEPS | SLOW_SWEEPS)[request.param]
    dirs = {name: references[name][0] for name in sweep.models}
    results = run_ranks(_all_outcomes, sweep.num_ranks, dirs, sweep.cases, SEQUENCES, timeout_s=400)
    return [
        (f"{name} in {sweep.cases[case]}", outcome, references[name][1])
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


def test_at_the_uneven_budget_replicas_differ_in_their_number_of_microbatches() -> None:
    counts = [
        len(collate([len(s.tokens) for s in share(SEQUENCES, replica, 2)], UNEVEN))
        for replica in range(2)
    ]
    assert counts == [2, 1]
