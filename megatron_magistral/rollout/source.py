"""Which problem the n-th admitted group gets: a function of (seed, n) and of nothing else.

Being a function, it needs no state to resume: the frontier is one integer, the next ordinal.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from megatron_magistral.types import Problem


class PromptSource:
    """Endless epochs over `problems`, each a permutation of its own."""

    def __init__(self, problems: Sequence[Problem], seed: int | str) -> None:
        if not problems:
            raise ValueError("the training set has no problems")
        self._problems = problems
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def problem(self, ordinal: int) -> Problem:
        """The problem of the `ordinal`-th admitted group, counted from 0."""
        epoch, position = divmod(ordinal, len(self._problems))
        return self._problems[self._order(epoch)[position]]

    def _shuffle(self, epoch: int) -> list[int]:
        order = list(range(len(self._problems)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
