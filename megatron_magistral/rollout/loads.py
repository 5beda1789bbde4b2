"""How many requests each engine has, and what share of the time it had none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from megatron_magistral.rollout.clocks import StateClock


class Activity(StrEnum):
    IDLE = "idle"
    BUSY = "busy"


class Loads:
    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._requests: dict[str, int] = {}
        self._clocks: dict[str, StateClock] = {}

    def add(self, engine: str) -> None:
        """An engine that has no requests yet."""
        self._requests[engine] = 0
        self._clocks[engine] = StateClock(Activity.IDLE, self._now_s)

    def drop(self, engine: str) -> None:
        """An engine that is looked at no more; requests that it still has may end."""
        self._clocks.pop(engine)

    def least(self, engines: Iterable[str]) -> str:
        """Of these engines, the one with the fewest requests."""
        return min(engines, key=self._requests.__getitem__)

    @contextmanager
    def one_more(self, engine: str) -> Iterator[None]:
        """`engine` has a request more as long as this lasts."""
        self._change(engine, 1)
        try:
            yield
        finally:
            self._change(engine, -1)

    def drain(self) -> dict[str, float]:
        """`generator_idle`: share of the time since the last drain that an engine had no request,
        as the mean over engines and for the idlest. Nothing where there are none."""
        idle = [clock.drain()[Activity.IDLE] for clock in self._clocks.values()]
        if not idle:
            return {}
        return {"generator_idle": sum(idle) / len(idle), "generator_idle_max": max(idle)}

    def _change(self, engine: str, by: int) -> None:
        self._requests[engine] += by
        if engine in self._clocks:
            busy = self._requests[engine] > 0
            self._clocks[engine].enter(Activity.BUSY if busy else Activity.IDLE)
