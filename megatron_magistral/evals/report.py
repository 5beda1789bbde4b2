"""The outcome of an evaluation: every sample's grade, and the summary by category and language."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from megatron_magistral.evals.estimators import mean, pass_at_1, pass_at_k, standard_error
from megatron_magistral.types import FinishReason, Graded, GradeStatus, Problem


class Score(msgspec.Struct, frozen=True):
    """Over the problems that have a graded sample; None where too few do."""

    num_problems: int
    pass_at_1: float | None
    standard_error: float | None
    pass_at_k: float | None
    """k is the number of samples: the share of problems solved at least once."""


class EvalReport(msgspec.Struct, frozen=True):
    """Rates are over graded samples (None: there are none); `num_masked` could not be graded."""

    protocol: dict[str, float]
    """How it was sampled: num_samples, temperature, top_p, max_new_tokens, version."""
    overall: Score
    by_category: dict[str, Score]
    by_language: dict[str, Score]
    mean_reward: float | None
    format_rate: float | None
    language_rate: float | None
    """Share of well-formed samples whose problem, thoughts and answer are in one language."""
    mean_num_tokens: float | None
    truncated_rate: float | None
    num_masked: int

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))

    @staticmethod
    def load(path: Path) -> EvalReport:
        return msgspec.json.decode(path.read_bytes(), type=EvalReport)


def summarise(
    samples: Sequence[tuple[Problem, Sequence[Graded]]], protocol: Mapping[str, float]
) -> EvalReport:
    """Reduce the graded samples of each problem to a report. A masked sample counts nowhere."""
    graded = [
        (problem, [item for item in items if item.reward.status is GradeStatus.GRADED])
        for problem, items in samples
    ]
    flat = [item for _, items in graded for item in items]
    well_formed = [item for item in flat if item.reward.format > 0]
    return EvalReport(
        protocol=dict(protocol),
        overall=_score(graded),
        by_category=_scores(graded, "category"),
        by_language=_scores(graded, "language"),
        mean_reward=_rate(item.reward.total for item in flat),
        format_rate=_rate(item.reward.format > 0 for item in flat),
        language_rate=_rate(item.reward.language > 0 for item in well_formed),
        mean_num_tokens=_rate(len(item.completion.output_ids) for item in flat),
        truncated_rate=_rate(item.completion.finish_reason is FinishReason.LENGTH for item in flat),
        num_masked=sum(len(items) for _, items in samples) - len(flat),
    )


def _rate(values: Iterable[float]) -> float | None:
    listed = list(values)
    return mean(listed) if listed else None


def _scores(graded: Iterable[tuple[Problem, list[Graded]]], attribute: str) -> dict[str, Score]:
    parts: dict[str, list[tuple[Problem, list[Graded]]]] = defaultdict(list)
    for problem, items in graded:
        parts[getattr(problem, attribute)].append((problem, items))
    return {key: _score(part) for key, part in sorted(parts.items())}


def _score(graded: Sequence[tuple[Problem, list[Graded]]]) -> Score:
    solved_P_G = [[item.reward.is_solved for item in items] for _, items in graded if items]
    return Score(
        num_problems=len(solved_P_G),
        pass_at_1=pass_at_1(solved_P_G) if solved_P_G else None,
        standard_error=standard_error(solved_P_G) if len(solved_P_G) > 1 else None,
        pass_at_k=_rate(pass_at_k(len(row), sum(row), len(row)) for row in solved_P_G),
    )
