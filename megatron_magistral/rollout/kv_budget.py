"""How much of each engine's KV cache its requests may take: `rl.kv_budget_tokens`.

A server's cache has the size that it was started with. What the present stage of a run may use of
it is kept here: a request is sent to an engine only if what its requests count for stays within the
budget. A request counts, until it ends, for its prompt and for what it has generated, or for
`reserve` x the longest completion that it may become, whichever is more.

With `reserve` = 1 that is all it can ever come to hold, so requests never hold more than the
budget. With less, more requests share the cache, since most completions stay far below l_max; what
those that grow beyond their share take is counted, and no request follows until there is room.

A budget that shrinks stops no request: those that were sent before it keep what they count for.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from megatron_magistral.rollout.completion import NewTokens


@dataclass(frozen=True)
class KvLimits:
    """`budget_tokens` of one engine, None for no bound; `reserve` as a share of a completion."""

    budget_tokens: int | None = None
    reserve: float = 1.0


@dataclass(frozen=True)
class Demand:
    """A request: tokens of its prompt, of its completion so far, and at most."""

    num_prompt: int
    num_done: int
    num_most: int

    def tokens(self, reserve: float) -> int:
        """What the request counts for when it is sent."""
        return self.num_prompt + max(self.num_done, math.ceil(reserve * self.num_most))


class Lease:
    """A request's part of the cache of `engine`, from when this is made until it is left."""

    def __init__(self, budget: KvBudget, engine: str, demand: Demand, num_tokens: int) -> None:
        self.engine = engine
        self._budget, self._num_prompt, self._num_tokens = budget, demand.num_prompt, num_tokens
        self._has_ended = False
        budget.change(engine, num_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended = True
        self._budget.change(self.engine, -self._num_tokens)

    def counting(
        self, on_tokens: Callable[[NewTokens], None] | None
    ) -> Callable[[NewTokens], None]:
        """Calls `on_tokens`, and counts what has arrived."""

        def arrived(new: NewTokens) -> None:
            growth = self._num_prompt + new.start + len(new.ids) - self._num_tokens
            if growth > 0 and not self._has_ended:
                self._num_tokens += growth
                self._budget.change(self.engine, growth)
            if on_tokens is not None:
                on_tokens(new)

        return arrived


class KvBudget:
    """What the requests of each engine count for, and whether there is room for one more."""

    def __init__(self) -> None:
        self._limits = KvLimits()
        self._used: Counter[str] = Counter()
        self._peak = 0
        self._freed = asyncio.Event()

    def set_limits(self, limits: KvLimits) -> None:
        """Requests that are sent from now on are sent by these."""
        self._limits = limits
        self.look_again()

    def used(self, engine: str) -> int:
        """Tokens that its requests count for."""
        return self._used[engine]

    def has_room(self, engine: str, demand: Demand) -> bool:
        budget = self._limits.budget_tokens
        return budget is None or self._used[engine] + self._tokens(demand) <= budget

    def lease(self, engine: str, demand: Demand) -> Lease:
        return Lease(self, engine, demand, self._tokens(demand))

    async def changed(self) -> None:
        """Wait until there may be room where there was none."""
        self._freed.clear()
        await self._freed.wait()

    def look_again(self) -> None:
        self._freed.set()

    def change(self, engine: str, by: int) -> None:
        self._used[engine] += by
        self._peak = max(self._peak, self._used[engine])
        if by < 0:
            self.look_again()

    def drain(self) -> dict[str, float]:
        """The most that requests of an engine counted for since this was last asked, where there
        is a budget."""
        peak, self._peak = self._peak, max(self._used.values(), default=0)
        budget = self._limits.budget_tokens
        if budget is None:
            return {}
        return {"kv_budget_tokens": float(budget), "kv_used_tokens_max": float(peak)}

    def _tokens(self, demand: Demand) -> int:
        return demand.tokens(self._limits.reserve)


class CacheTooSmall(RuntimeError):
    """Servers whose KV cache is smaller than the budget; names them."""


class HasCache(Protocol):
    @property
    def name(self) -> str: ...

    async def kv_cache_tokens(self) -> int: ...


async def check_caches(engines: Sequence[HasCache], budget_tokens: int) -> None:
    """Servers choose the size of their cache by the memory that they find: it is known last.

    Raises CacheTooSmall.
    """
    sizes = await asyncio.gather(*(engine.kv_cache_tokens() for engine in engines))
    small = [
        f"{engine.name} holds {size:,}"
        for engine, size in zip(engines, sizes, strict=True)
        if size < budget_tokens
    ]
    if small:
        raise CacheTooSmall(
            f"rl.kv_budget_tokens = {budget_tokens}: must be at most the tokens that the KV cache "
            f"of every generator holds: {', '.join(small)}"
        )
