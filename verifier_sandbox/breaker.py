"""Whether a node is to be asked: a circuit breaker. Pure; times are the caller's, in seconds.

    closed --faults in a row--> open --pause--> half-open --answer--> closed
                                  ^-----------------'---fault

A closed breaker lets every request through, after a fault with a short pause, so that other nodes
are chosen first. An open one lets none through. A half-open one lets one through, on trial.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

FIRST_PAUSE_S = 0.1
MAX_FULL_PAUSE_S = 10.0


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass
class Breaker:
    """Opens after `max_faults` in a row, for `pause_s`."""

    max_faults: int
    pause_s: float
    num_faults_in_a_row: int = 0
    num_faults: int = 0
    num_opened: int = 0
    reopens_at: float = 0.0
    """Nothing gets through before this time."""
    last_fault: str = ""

    def state(self, now: float) -> BreakerState:
        if self.num_faults_in_a_row < self.max_faults:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.reopens_at else BreakerState.HALF_OPEN

    def lets_through(self, now: float, num_in_flight: int) -> bool:
        """Whether a node that works on so many requests may get another."""
        if now < self.reopens_at:
            return False
        return self.state(now) is BreakerState.CLOSED or num_in_flight == 0

    def answered(self) -> None:
        self.num_faults_in_a_row = 0

    def failed(self, reason: str, now: float) -> None:
        was_closed = self.state(now) is BreakerState.CLOSED
        self.num_faults_in_a_row += 1
        self.num_faults += 1
        self.last_fault = reason
        is_closed = self.state(now) is BreakerState.CLOSED
        self.num_opened += was_closed and not is_closed
        pause_s = FIRST_PAUSE_S * 2**self.num_faults_in_a_row if is_closed else self.pause_s
        self.reopens_at = now + pause_s

    def is_full(self, retry_after_s: float, now: float) -> None:
        """The node turned a request away: back-pressure, not a fault."""
        self.reopens_at = now + min(retry_after_s, MAX_FULL_PAUSE_S)
