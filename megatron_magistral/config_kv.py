"""Whether completions fit the generators' KV caches, and the budget that a stage gives them. Pure.

Every length is in tokens. Of a prompt it is known here that it has at least one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class KvRoom:
    """What decides: the cache of one generator (None: the server's choice), the stage's budget for
    it (None: no bound) and reserve, and the longest completion, of the stage and of all before it,
    whose groups may still be under way."""

    cache_tokens: int | None
    budget_tokens: int | None
    reserve: float
    l_max: int
    longest: int

    def problems(self) -> list[str]:
        problems = []
        cache, budget = self.cache_tokens, self.budget_tokens
        if cache is not None and cache <= self.longest:
            problems.append(
                f"generator.max_total_tokens = {cache} must hold a prompt and a whole completion: "
                f"more than reward.l_max = {self.longest}"
            )
        if budget is not None and budget <= self.longest:
            problems.append(
                f"rl.kv_budget_tokens = {budget} must hold a prompt and a whole completion: more "
                f"than reward.l_max = {self.longest}"
            )
        if budget is not None and cache is not None and budget > cache:
            problems.append(
                f"rl.kv_budget_tokens = {budget} must be at most generator.max_total_tokens = "
                f"{cache}, all that a generator's KV cache holds"
            )
        return problems

    def warnings(self, n_async: int, num_replicas: int) -> list[str]:
        if self.budget_tokens is None:
            return []
        each = 1 + math.ceil(self.reserve * self.l_max)
        at_once = num_replicas * (self.budget_tokens // each)
        if at_once >= n_async:
            return []
        return [
            f"rl.kv_budget_tokens = {self.budget_tokens}: {num_replicas} generators take at most "
            f"{at_once} sequences at once that count for {self.reserve:g} x l_max = {each - 1} "
            f"tokens and their prompts, so rl.n_async = {n_async} are not reached"
        ]
