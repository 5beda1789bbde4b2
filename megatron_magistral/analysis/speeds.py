"""How fast a generator is, depending on how many completions it runs at once. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class SpeedCurve:
    """(completions at once, tokens/s of all of them together) of one generator, by measurement or
    from a model. Linear in between; fewer than the first point run at its tokens/s each, more than
    the last together at its tokens/s.

    Raises ValueError for points that are no curve.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a speed curve needs at least one point, concurrency and tokens/s")
        for concurrency, tokens_per_s in self.points:
            both = (concurrency, tokens_per_s)
            if not all(number > 0 and math.isfinite(number) for number in both):
                raise ValueError(f"{concurrency:g}:{tokens_per_s:g}: both must be more than 0")
        for (before, _), (after, _) in pairwise(self.points):
            if after <= before:
                raise ValueError(f"concurrency {after:g} must be more than {before:g} before it")

    @classmethod
    def parse(cls, text: str) -> SpeedCurve:
        """From `1:250,16:2000,64:3500`. Raises ValueError."""
        points = []
        for item in text.split(","):
            left, _, right = item.partition(":")
            try:
                points.append((float(left), float(right)))
            except ValueError:
                raise ValueError(f"{item!r}: must be CONCURRENCY:TOKENS_PER_S") from None
        return cls(tuple(points))

    def __str__(self) -> str:
        return ",".join(f"{c:g}:{speed:.4g}" for c, speed in self.points)

    def tokens_per_s(self, concurrency: float) -> float:
        """Of all completions together."""
        counts, speeds = zip(*self.points, strict=True)
        if concurrency < counts[0]:
            return concurrency * speeds[0] / counts[0]
        return float(np.interp(concurrency, counts, speeds))


def sequence_rates(
    curve: SpeedCurve, num_replicas: int, most_per_replica: int, n_async: int
) -> tuple[float, ...]:
    """Tokens/s of each of n completions on `num_replicas` generators, for `Speeds.rates`.

    Fewer completions than generators run alone. At most `most_per_replica` run at once on one.
    """
    most = min(n_async, num_replicas * most_per_replica)
    counts = np.arange(1, most + 1)
    loads = np.maximum(counts / num_replicas, 1.0)
    xs, ys = zip(*curve.points, strict=True)
    together = np.where(loads < xs[0], loads * ys[0] / xs[0], np.interp(loads, xs, ys))
    return (0.0, *(together / loads).tolist())


def mean_context(lengths: Sequence[float], prompt_tokens: float) -> float:
    """Tokens that a running completion has on average behind it, its prompt included, where
    generation is kept full: of long ones more are running at any time than are admitted."""
    values = np.asarray(lengths)
    return prompt_tokens + float((values**2).sum() / (2 * values.sum()))
