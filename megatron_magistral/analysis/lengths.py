"""Distributions of completion lengths: given by name and numbers, or taken from a run."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_magistral.analysis.pipeline_model import SampleLength
from megatron_magistral.jsonl import DamagedRows, read_rows
from megatron_magistral.run_folder import RunFolder

NUM_DRAWS = 20_000
# Beyond these nothing that a model writes is like it, and a float overflows.
MAX_MEAN, MAX_SIGMA = 1e9, 5.0
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
    sane = bool(values) and values[0] <= MAX_MEAN
    sane = sane and all(v > 0 and math.isfinite(v) for v in values)
    match kind, values:
        case "constant", [mean] if sane:
            return Lengths(text, lambda rng: min(mean, cap), cap)
        case "lognormal", [mean, sigma] if sane and sigma <= MAX_SIGMA:
            mu = math.log(mean) - sigma**2 / 2
            return Lengths(text, lambda rng: min(rng.lognormvariate(mu, sigma), cap), cap)
        case "pareto", [mean, alpha] if sane and alpha > 1:
            least = mean * (alpha - 1) / alpha
            return Lengths(text, lambda rng: min(least * rng.paretovariate(alpha), cap), cap)
    raise LengthsError(
        f"lengths {text!r}: must be {FORMS}, numbers above 0, MEAN at most {MAX_MEAN:g}, SIGMA at "
        f"most {MAX_SIGMA:g} and ALPHA above 1, for example lognormal:4000,1"
    )


def lengths_of_run(run: RunFolder, cap: float) -> Lengths:
    """What a run's completions were like: the lengths of samples.jsonl, whose shape is that of the
    completions that finished first in their batch, scaled to the mean of metrics.jsonl.

    Raises LengthsError if the run has trained no step yet.
    """
    try:
        samples, rows = read_rows(run.samples), read_rows(run.metrics)
    except DamagedRows as error:
        raise LengthsError(str(error)) from error
    sampled = [float(row["spans"][-1][2]) for row in samples if row.get("spans")]
    name = "completion_tokens_mean"
    means = [float(row[name]) for row in rows if row.get(name)]
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
