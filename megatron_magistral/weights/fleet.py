"""Updates of a whole fleet of engines, of which some may fail: the rest goes on.

An update is one round where nothing fails. Engines that a failed round has left without the new
version get it in another round, over a new group of just them; an engine that keeps failing, or is
dead, is left out until a later update finds it alive again. Every round sends all weights.

Runs on trainer rank 0. Rounds are collective (all ranks gather the weights of each), so this rank
tells the others after each round whether another one follows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from torch import Tensor

from megatron_magistral.rollout.engine import EngineControl, EngineError, EngineMismatch, Phase
from megatron_magistral.rollout.engine_state import EngineEvent, EngineState, EngineStatus
from megatron_magistral.weights.delivery import EngineAddress
from megatron_magistral.weights.engine_set import EngineSet, Step
from megatron_magistral.weights.transfer import UpdateFailed, UpdateTimings, WeightSender

log = logging.getLogger(__name__)

POLL_S = 1.0
# How long an update may be held up by looking for engines that are being restarted.
LOOK_S = 1.0


class Round(IntEnum):
    """How a round ended; a number, so that it can be broadcast."""

    DONE = 0
    AGAIN = 1
    FAILED = 2


class FleetExhausted(RuntimeError):
    """No engine is left that could be updated; names all of them with what happened to each."""


@dataclass(frozen=True)
class FleetSettings:
    """Bounds of what is done about failing engines.

    `alive_s` is how long an engine may take to give a sign of life, `max_tries` how often it may
    fail during one update. A restarted one may take `restart_s` until it answers. Where no other
    is left, it is waited for, at most `wait_s`; that must be less than the time that other ranks
    wait in a collective.
    """

    alive_s: float = 5.0
    restart_s: float = 600.0
    wait_s: float = 300.0
    max_restarts: int = 3
    max_tries: int = 2


class Fleet:
    """The engines of a run as the trainer sees them. `sender` belongs to the fleet."""

    def __init__(
        self,
        sender: WeightSender,
        engines: Sequence[EngineAddress],
        settings: FleetSettings | None = None,
    ) -> None:
        self._sender = sender
        self._settings = settings or FleetSettings()
        self._addresses: dict[str, EngineAddress] = {}
        self.statuses: dict[str, EngineStatus] = {}
        self._version: dict[str, int] = {}  # that each engine serves for certain
        self._tries: dict[str, int] = {}
        self._target = -1
        self._pinned: frozenset[str] = frozenset()
        self.timings: UpdateTimings | None = None
        self.num_mismatches = 0
        for engine in engines:
            self.join(engine)

    def join(self, engine: EngineAddress) -> None:
        """Take in an engine; it gets the next update."""
        name = engine.control_name
        self._addresses[name] = engine
        self.statuses[name] = EngineStatus(name, since_s=time.monotonic())

    def leave(self, name: str) -> None:
        """Forget an engine; the next update goes to the others."""
        del self._addresses[name], self.statuses[name]
        self._version.pop(name, None)

    @property
    def serving(self) -> list[str]:
        """Engines that hold the version of the present update, whole and checked."""
        return [name for name in self.statuses if self._version.get(name) == self._target]

    @property
    def serving_addresses(self) -> list[EngineAddress]:
        return [self._addresses[name] for name in self.serving]

    def connect(self) -> None:
        """The first connection, for which every engine must be there and fit.

        Raises:
            UpdateFailed: names those that are not.
        """
        self._sender.connect(list(self._addresses.values()))

    def begin(self, version: int, pinned: Iterable[str] = ()) -> None:
        """An update to `version` begins. Looks for engines that have come back.

        `pinned` engines are to keep the version that they hold, as long as another engine gets
        the new one.
        """
        self._target = version
        self._pinned = frozenset(pinned)
        self._tries = dict.fromkeys(self._addresses, 0)
        self.timings = None
        self._look_for_restarted()
        self._look_for_replaced()

    def round(self, buckets: Iterable[Sequence[tuple[str, Tensor]]]) -> Round:
        """Send the weights to all engines that lack the version. Iterates `buckets` to the end.

        After FAILED, `describe` says why.
        """
        iterator = iter(buckets)
        connected = self._connect_lacking()
        try:
            if connected:
                self.timings = self._sender.send(iterator, self._target)
                for name in self._sender.names:
                    self._updated(name)
        except UpdateFailed as failure:
            self._learn(failure)
        for _ in iterator:
            pass
        if self._lacking():
            return Round.AGAIN
        if self.serving:
            return Round.DONE
        # Without a connection, a restart has been waited for already.
        may_go_on = self._pinned or (connected and self._may_come_back())
        return Round.AGAIN if may_go_on else Round.FAILED

    def describe(self) -> str:
        return "; ".join(str(status) for status in self.statuses.values())

    def close(self) -> None:
        self._sender.close()

    def _lacking(self) -> list[str]:
        """Living engines without the version of this update that may still be tried."""
        usable = (EngineState.HEALTHY, EngineState.STALE)
        return [
            name
            for name, status in self.statuses.items()
            if status.state in usable
            and self._version.get(name) != self._target
            and self._tries.get(name, 0) < self._settings.max_tries
            and name not in self._pinned
        ]

    def _connect_lacking(self) -> bool:
        """Form a group of the lacking engines that can be connected; whether there are any."""
        if not self._lacking() and not self.serving:
            self._pinned = frozenset()  # training comes before evaluation
            if not self._lacking():
                self._wait_for_a_restart()
        while lacking := self._lacking():
            if self._sender.is_connected and sorted(self._sender.names) == sorted(lacking):
                return True
            try:
                self._sender.connect([self._addresses[name] for name in lacking])
            except UpdateFailed as failure:
                self._learn(failure)
        return False

    def _learn(self, failure: UpdateFailed) -> None:
        """What a failed update or connection says about each engine."""
        log.warning("%s", failure)
        for name in failure.updated:
            self._updated(name)
        failed = {error.engine: error for error in failure.errors}
        self.num_mismatches += sum(isinstance(e, EngineMismatch) for e in failed.values())
        for name, error in failed.items():
            self._note(name, EngineEvent.MISSED, str(error))
        for name in failed or failure.quarantined:  # of many, only those who broke it
            self._tries[name] = self._tries.get(name, 0) + 1
        for name in failure.quarantined:
            self._version.pop(name, None)
        silent = self._silent([*failed], self._settings.alive_s)
        for name in {*failed, *failure.quarantined}:
            event = EngineEvent.SILENT if name in silent else EngineEvent.DOUBTFUL
            self._note(name, event, str(failed.get(name, failure)))

    def _look_for_restarted(self) -> None:
        """Dead engines are somebody else's to restart; here they are only looked for."""
        for name, status in self.statuses.items():
            if status.state is EngineState.DEAD and self._has_restarts_left(status):
                self._note(name, EngineEvent.RESTART, status.why)
        missing = [n for n, s in self.statuses.items() if s.state is EngineState.RESTARTING]
        silent = self._silent(missing, LOOK_S)
        for name in missing:
            waited_s = time.monotonic() - self.statuses[name].since_s
            if name not in silent:
                self._note(name, EngineEvent.UP, "answers again")
            elif waited_s > self._settings.restart_s:
                self._note(name, EngineEvent.SILENT, f"not back after {waited_s:.0f} s")

    def _wait_for_a_restart(self) -> None:
        """Wait until an engine has come back, at most `wait_s`."""
        begin = time.monotonic()
        while self._may_come_back() and time.monotonic() - begin < self._settings.wait_s:
            self._look_for_restarted()
            if self._lacking():
                return
            time.sleep(POLL_S)

    def _may_come_back(self) -> bool:
        return any(
            status.state is EngineState.RESTARTING
            or (status.state is EngineState.DEAD and self._has_restarts_left(status))
            for status in self.statuses.values()
        )

    def _has_restarts_left(self, status: EngineStatus) -> bool:
        return status.num_restarts < self._settings.max_restarts

    def _look_for_replaced(self) -> None:
        """An engine that was restarted since the last update holds other weights than it got."""

        async def check(engine: EngineControl) -> None:
            held = await engine.weight_version()
            if held != self._version[engine.name]:
                detail = f"holds version {held}, got {self._version[engine.name]}"
                raise EngineMismatch(engine.name, Phase.INFO, 0.0, detail)

        errors = self._ask([*self._version], check, Phase.INFO)
        if errors:
            self._sender.close()  # its group is one member short
        for error in errors:
            self._version.pop(error.engine)
            self._note(error.engine, EngineEvent.MISSED, str(error))
            silent = not isinstance(error, EngineMismatch)
            self._note(
                error.engine,
                EngineEvent.SILENT if silent else EngineEvent.DOUBTFUL,
                str(error),
            )

    def _silent(self, names: Sequence[str], within_s: float) -> set[str]:
        """Those of `names` that give no sign of life."""
        alive = partial(EngineControl.wait_ready, timeout_s=within_s)
        return {error.engine for error in self._ask(names, alive, Phase.READY)}

    def _ask(self, names: Sequence[str], step: Step, phase: Phase) -> list[EngineError]:
        """Run `step` on some engines, connected or not."""
        if not names:
            return []
        engines = EngineSet([EngineControl(self._addresses[n].url, name=n) for n in names])
        try:
            return engines.run(phase, step)
        finally:
            engines.close()

    def _updated(self, name: str) -> None:
        self._version[name] = self._target
        self._note(name, EngineEvent.UPDATED, f"version {self._target}")

    def _note(self, name: str, event: EngineEvent, why: str) -> None:
        before = self.statuses[name]
        self.statuses[name] = before.after(event, why, time.monotonic())
        if self.statuses[name].state is not before.state:
            log.info("%s, was %s", self.statuses[name], before.state)
