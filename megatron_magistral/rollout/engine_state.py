"""The states of an engine, and what may follow what. Pure: no clock, no network.

    healthy --missed--> suspect --silent--> dead --restart--> restarting --up--> stale
       ^------------------------------ updated ------------------------------------'

Only a healthy engine gets requests. A suspect one missed a request or a phase of an update and is
being asked for a sign of life. A stale one lives, but holds weights that are old, partial, wrong
or unknown: nothing but a full update makes it healthy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class EngineState(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"


class EngineEvent(StrEnum):
    MISSED = "missed a request or a phase"
    INTACT = "answers, weights as they were"
    DOUBTFUL = "answers, weights not known to be whole"
    SILENT = "does not answer"
    RESTART = "is being restarted"
    UP = "answers after a restart"
    UPDATED = "got a full, checked update"


_H, _S, _D, _R, _O = (
    EngineState.HEALTHY,
    EngineState.SUSPECT,
    EngineState.DEAD,
    EngineState.RESTARTING,
    EngineState.STALE,
)
# What is not listed cannot happen, and raises. Some events tell nothing new and keep the state.
# Only a healthy engine becomes suspect, so that "intact" can be true of a suspect one; what a stale
# one holds is in doubt until a full update.
TRANSITIONS: dict[tuple[EngineState, EngineEvent], EngineState] = {
    (_H, EngineEvent.MISSED): _S,
    (_H, EngineEvent.DOUBTFUL): _O,
    (_S, EngineEvent.MISSED): _S,
    (_S, EngineEvent.INTACT): _H,
    (_S, EngineEvent.DOUBTFUL): _O,
    (_S, EngineEvent.SILENT): _D,
    (_D, EngineEvent.MISSED): _D,
    (_D, EngineEvent.DOUBTFUL): _D,
    (_D, EngineEvent.SILENT): _D,
    (_D, EngineEvent.RESTART): _R,
    (_R, EngineEvent.MISSED): _R,
    (_R, EngineEvent.DOUBTFUL): _R,
    (_R, EngineEvent.SILENT): _D,
    (_R, EngineEvent.UP): _O,
    (_O, EngineEvent.MISSED): _O,
    (_O, EngineEvent.DOUBTFUL): _O,
    (_O, EngineEvent.SILENT): _D,
    # Proof whatever was thought before: every tensor arrived, and the engine resumed.
    **{(state, EngineEvent.UPDATED): _H for state in EngineState},
}


class IllegalTransition(RuntimeError):
    """An event that cannot happen to an engine in its state: whoever reported it is wrong."""


@dataclass(frozen=True)
class EngineStatus:
    """One engine's state, why it is in it, since when (monotonic seconds), and what that cost."""

    name: str
    state: EngineState = EngineState.STALE  # weights from disk are not a policy of this run
    why: str = "not updated yet"
    since_s: float = 0.0
    num_restarts: int = 0

    def after(self, event: EngineEvent, why: str, now_s: float) -> EngineStatus:
        """The status once `event` has happened.

        Raises:
            IllegalTransition: it cannot happen in this state.
        """
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise IllegalTransition(f"engine {self.name}: {self.state} and then '{event}' ({why})")
        since_s = self.since_s if state is self.state else now_s
        restarts = self.num_restarts + (event is EngineEvent.RESTART)
        return replace(self, state=state, why=why, since_s=since_s, num_restarts=restarts)

    def __str__(self) -> str:
        return f"engine {self.name}: {self.state} ({self.why})"


def state_metrics(statuses: Iterable[EngineStatus]) -> dict[str, float]:
    """How many engines are in each state, and how often one of them was restarted."""
    statuses = tuple(statuses)
    number = Counter(status.state for status in statuses)
    restarts = sum(status.num_restarts for status in statuses)
    return {f"engines_{state}": float(number[state]) for state in EngineState} | {
        "engine_restarts_total": float(restarts)
    }
