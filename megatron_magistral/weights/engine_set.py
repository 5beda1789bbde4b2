"""The same control call on many engines at once, for synchronous code.

HTTP runs on an event loop of its own thread, so that the caller's thread is free for collectives.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from megatron_magistral.rollout.engine import EngineControl, EngineError, EngineTimeout, Phase

Step = Callable[[EngineControl], Coroutine[Any, Any, None]]


class PendingCalls:
    """One call in flight on each of some engines."""

    def __init__(self, phase: Phase, calls: dict[str, Future[None]]) -> None:
        self._phase = phase
        self._calls = calls
        self._start = time.monotonic()

    def failures(self) -> list[EngineError]:
        """Engines that have failed by now, without waiting."""
        outcomes = [call.exception() for call in self._calls.values() if call.done()]
        for outcome in outcomes:
            if outcome is not None and not isinstance(outcome, EngineError):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, EngineError)]

    def wait(self, timeout_s: float | None = None) -> list[EngineError]:
        """Wait for all answers and return the failures.

        Every call has its own bound; `timeout_s` is a shorter one for all of them. An engine that
        has not answered by then counts as an `EngineTimeout`.
        """
        wait(self._calls.values(), timeout_s)
        elapsed_s = time.monotonic() - self._start
        silent = [name for name, call in self._calls.items() if not call.done()]
        return self.failures() + [
            EngineTimeout(name, self._phase, elapsed_s, "no answer") for name in silent
        ]

    def settled(self, timeout_s: float) -> bool:
        """Wait until all have answered or one has failed, at most so long; whether that is so."""
        _, waiting = wait(self._calls.values(), timeout_s, return_when=FIRST_EXCEPTION)
        return not waiting or bool(self.failures())

    def wait_for_failure(self, timeout_s: float) -> list[EngineError]:
        """Wait for the first failures and return them, before any that follow from them.

        If none comes in time, every engine that has not answered counts as an `EngineTimeout`.
        """
        wait(self._calls.values(), timeout_s, return_when=FIRST_EXCEPTION)
        return self.failures() or self.wait(timeout_s=0.0)


class EngineSet:
    """Some engines and the thread that speaks to them."""

    def __init__(self, engines: Sequence[EngineControl]) -> None:
        self.engines = list(engines)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="engine-control", daemon=True
        )
        self._thread.start()

    @property
    def names(self) -> list[str]:
        return [engine.name for engine in self.engines]

    def start(
        self, phase: Phase, step: Step, engines: Sequence[EngineControl] | None = None
    ) -> PendingCalls:
        """Start `step` on all engines, or on those given."""
        chosen = self.engines if engines is None else engines
        calls = {
            engine.name: asyncio.run_coroutine_threadsafe(step(engine), self._loop)
            for engine in chosen
        }
        return PendingCalls(phase, calls)

    def run(
        self, phase: Phase, step: Step, engines: Sequence[EngineControl] | None = None
    ) -> list[EngineError]:
        """Run `step` on all engines, or on those given, and return the failures."""
        return self.start(phase, step, engines).wait()

    def without(self, errors: Sequence[EngineError]) -> list[EngineControl]:
        """The engines that none of `errors` is about."""
        failed = {error.engine for error in errors}
        return [engine for engine in self.engines if engine.name not in failed]

    def close(self) -> None:
        self.run(Phase.LEAVE, EngineControl.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
