"""Estimators over repeated samples of a problem. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean. Raises ValueError of nothing."""
    if not values:
        raise ValueError("the mean of no values")
    return math.fsum(values) / len(values)


def pass_at_1(correct_P_G: Sequence[Sequence[bool]]) -> float:
    """Mean over P problems of the share of their G samples that are correct."""
    return mean([mean(correct_G) for correct_G in correct_P_G])


def standard_error(correct_P_G: Sequence[Sequence[bool]]) -> float:
    """Of `pass_at_1`, from the spread of the problems' own means. Raises ValueError below two."""
    means = [mean(correct_G) for correct_G in correct_P_G]
    if len(means) < 2:
        raise ValueError(f"a standard error needs two problems, not {len(means)}")
    centre = mean(means)
    variance = math.fsum((value - centre) ** 2 for value in means) / (len(means) - 1)
    return math.sqrt(variance / len(means))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a correct one (unbiased)."""
    if not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"num_correct = {num_correct} must lie in [0, num_samples = {num_samples}]"
        )
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} must lie in [1, num_samples = {num_samples}]")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
