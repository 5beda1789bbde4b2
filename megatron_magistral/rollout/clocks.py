"""How long things were in which state: shares of time between two readings, and mean waits.

The clock is a parameter, so that tests and simulations bring their own.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum


class StateClock:
    """Time spent in each state of one thing; states are members of one enum."""

    def __init__(self, state: StrEnum, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._state = state
        self._since = self._begin = now_s()
        self._spent: defaultdict[StrEnum, float] = defaultdict(float)

    def enter(self, state: StrEnum) -> None:
        """From now on it is in `state`."""
        if state is self._state:
            return
        self._settle()
        self._state = state

    def drain(self) -> dict[str, float]:
        """Share of the time since the last drain in each state of the enum; they add up to 1
        (to 0 where no time has passed)."""
        self._settle()
        elapsed_s = self._since - self._begin
        shares = {
            str(state): self._spent[state] / elapsed_s if elapsed_s > 0 else 0.0
            for state in type(self._state)
        }
        self._spent.clear()
        self._begin = self._since
        return shares

    def _settle(self) -> None:
        now = self._now_s()
        self._spent[self._state] += now - self._since
        self._since = now


class WaitClock:
    """Durations of one kind of wait."""

    def __init__(self) -> None:
        self._count, self._total_s, self._longest_s = 0, 0.0, 0.0

    def add(self, wait_s: float) -> None:
        self._count += 1
        self._total_s += wait_s
        self._longest_s = max(self._longest_s, wait_s)

    def drain(self, name: str) -> dict[str, float]:
        """`<name>_s_mean` and `<name>_s_max` since the last drain; nothing if there was none."""
        if not self._count:
            return {}
        found = {f"{name}_s_mean": self._total_s / self._count, f"{name}_s_max": self._longest_s}
        self._count, self._total_s, self._longest_s = 0, 0.0, 0.0
        return found
