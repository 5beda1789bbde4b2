"""What the objectives report beside their loss. Shapes: R trained rows."""

import pytest
import torch

from megatron_magistral.algorithm.settings import AlgorithmSettings
from megatron_magistral.trainer.batch import pack
from megatron_magistral.trainer.objective import PolicyObjective
from megatron_magistral.types import Span, TrainSequence


def sequence(spans: tuple[Span, ...], logprobs: tuple[float, ...]) -> TrainSequence:
    return TrainSequence(
        tokens=(1,) * (1 + len(logprobs)),
        num_prompt_tokens=1,
        logprobs=logprobs,
        spans=spans,
        advantage=1.0,
        weight=0.5,
    )


def test_the_log_probability_gap_is_reported_by_the_age_of_the_token() -> None:
    batch = pack([sequence((Span(5, 0, 1), Span(7, 1, 3)), (-1.0, -2.0, -3.0))])
    objective = PolicyObjective(AlgorithmSettings(), version=7)
    logprobs_R = torch.tensor([-1.5, -2.0, -2.0])
    outputs = objective.loss(logprobs_R, torch.zeros(3), batch)
    means = objective.means({name: float(value) for name, value in outputs.metrics.items()})
    assert means["log_ratio_abs_age_2"] == pytest.approx(0.5)
    assert means["log_ratio_abs_age_0"] == pytest.approx(0.5)
    assert means["token_share_age_0"] == pytest.approx(2 / 3)
    assert "log_ratio_abs_age_1" not in means
    assert means["num_tokens"] == 3
