"""Distributions of completion lengths: given by name and numbers, or taken from a run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from megatron_magistral.analysis.pipeline_model import SampleLength
from megatron_magistral.run_folder import RunFolder

NUM_DRAWS = 20_000
FORMS = "constant:MEAN, lognormal:MEAN,SIGMA or pareto:MEAN,ALPHA"


class LengthsError(ValueError):
    """No distribution; says what would be one."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of completion lengths in tokens; `sample` draws one, at most `cap`."""

    description: str
    sample: SampleLength
    cap: float

    def draws(self, count: int = NUM_DRAWS) -> list[float]:
        """The same ones every time."""
        rng = random.Random(0)
        return [self.sample(rng) for _ in range(count)]


def parse_lengths(text: str, cap: float) -> Lengths:
    """From one of FORMS, MEAN being that before the cap. Raises LengthsError."""
    kind, _, numbers = text.partition(":")
    try:
        values = [float(number) for number in numbers.split(",")]
    except ValueError:
        values = []
    sane = bool(values) and all(v > 0 and math.isfinite(v) for v in values)
    match kind, values:
        case "constant", [mean] if sane:
            return Lengths(text, lambda rng: min(mean, cap), cap)
        case "lognormal", [mean, sigma] if sane:
            mu = math.log(mean) - sigma**2 / 2
            return Lengths(text, lambda rng: min(rng.lognormvariate(mu, sigma), cap), cap)
        case "pareto", [mean, alpha] if sane and alpha > 1:
            least = mean * (alpha - 1) / alpha
            return Lengths(text, lambda rng: min(least * rng.paretovariate(alpha), cap), cap)
    raise LengthsError(
        f"lengths {text!r}: must be {FORMS}, numbers above 0 and ALPHA above 1, for example "
        "lognormal:4000,1"
    )


def lengths_of_run(run: RunFolder, cap: float) -> Lengths:
    """What a run's completions were like: the lengths of samples.jsonl, whose shape is that of the
    completions that finished first in their batch, scaled to the mean of metrics.jsonl.

    Raises LengthsError if the run has trained no step yet.
    """
    sampled = [float(row["spans"][-1][2]) for row in _rows(run.samples) if row.get("spans")]
    means = [
        float(row["completion_tokens_mean"])
        for row in _rows(run.metrics)
        if "completion_tokens_mean" in row
    ]
    if not sampled or not means:
        raise LengthsError(
            f"{run.root}: has no {run.samples.name} and {run.metrics.name} of an RL step to take "
            "lengths from"
        )
    return empirical(sampled, fmean(means), cap, f"{len(sampled)} completions of {run.root.name}")


def empirical(lengths: Sequence[float], mean: float, cap: float, description: str) -> Lengths:
    """Draws from `lengths`, scaled to `mean`."""
    scale = mean / fmean(lengths)
    values = [min(length * scale, cap) for length in lengths]
    return Lengths(description, lambda rng: rng.choice(values), cap)


def _rows(path: Path) -> Iterable[dict]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
