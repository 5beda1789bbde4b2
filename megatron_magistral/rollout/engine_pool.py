"""The generators of a run as one: least-loaded choice, and a gate that closes while weights change.

Requests in flight go on through a weight update; only requests that were not yet sent wait. No
request that begins after an update reuses a prefix that older weights computed: it carries the
policy version as its cache salt, and for those that wait in an engine its plugin sees to that.

Only healthy engines get requests. What an engine had sampled when it broke is kept: the request
goes on from there on another one. An engine that missed a request, or answered what cannot be, is
asked for a sign of life; a dead one is restarted, so often and no oftener, and gets nothing before
its first full update.

An engine can be pinned to the version that it holds, to evaluate that: it gets no updates and no
other requests meanwhile, and the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from megatron_magistral.rollout.completion import NewTokens
from megatron_magistral.rollout.engine import EngineError
from megatron_magistral.rollout.engine_state import EngineEvent, EngineState, EngineStatus
from megatron_magistral.rollout.generator import GenerationInterrupted, SamplingSettings
from megatron_magistral.rollout.kv_budget import Demand, KvBudget, Lease
from megatron_magistral.rollout.loads import Loads
from megatron_magistral.rollout.pool_parts import (
    Engine,
    NoEngineLeft,
    Pin,
    PinLost,
    PoolSettings,
    announced_alone,
    holds,
    restarted_elsewhere,
)
from megatron_magistral.types import Completion

log = logging.getLogger(__name__)


class EnginePool:
    """Spreads requests over engines that hold policy `version`.

    `restart` is asked to start a dead engine's process anew under the same address; it returns
    when that is under way. `wants_update` says that an engine lives that only an update can make
    healthy.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        settings: PoolSettings | None = None,
        restart: Callable[[str], Awaitable[None]] = restarted_elsewhere,
    ) -> None:
        self._settings = settings or PoolSettings()
        self._restart = restart
        self._engines: dict[str, Engine] = {}
        self.loads = Loads()
        self.kv = KvBudget()
        self._turn, self._pinned_turn = asyncio.Lock(), asyncio.Lock()
        self._examining: dict[str, asyncio.Task[None]] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._pin: Pin | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._gate = asyncio.Event()
        self._available = asyncio.Event()
        self.statuses: dict[str, EngineStatus] = {}
        self.version = self._announced = -1
        self.wants_update = False
        self.num_lost_updates = 0
        self.num_retried = 0
        for engine in engines:
            self.join(engine)

    def join(self, engine: Engine) -> None:
        """Take in an engine; it gets requests once an update has reached it."""
        self._engines[engine.name] = engine
        self.loads.add(engine.name)
        self.statuses[engine.name] = EngineStatus(engine.name, since_s=time.monotonic())

    def leave(self, name: str) -> None:
        """Forget an engine; its requests go on elsewhere."""
        self._stop_examining(name)
        del self.statuses[name]
        self.loads.drop(name)
        self._engines.pop(name).interrupt()
        self._refresh()

    @property
    def is_open(self) -> bool:
        return self._gate.is_set()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        partial: Completion | None = None,
        on_tokens: Callable[[NewTokens], None] | None = None,
    ) -> Completion:
        """Sample one completion, or what a `partial` one lacks, on as many engines as it takes.

        `on_tokens` is called with what arrives; a chunk that starts before the end of what came
        before it replaces that.

        Raises:
            NoEngineLeft: within the bounds no engine could finish it.
        """
        failure = ""
        for _ in range(self._settings.max_tries):
            demand = _demand(prompt_ids, sampling, partial)
            lease = await self._place(demand, self._turn, self._usable)
            engine, version = self._engines[lease.engine], self.version
            told = announced_alone(on_tokens, version, lambda: self._announced, engine.name)
            try:
                with lease, self.loads.one_more(engine.name):
                    completion = await engine.generate(
                        prompt_ids,
                        sampling,
                        cache_salt=f"v{version}",
                        partial=partial,
                        on_tokens=lease.counting(told),
                    )
                if self._is_sound(engine, completion, partial, version):
                    return completion
                failure = f"engine {engine.name} sampled with other weights"
                self.wants_update = True  # it lives, and nobody else will ask for one
            except EngineError as error:
                if isinstance(error, GenerationInterrupted) and self._is_sound(
                    engine, error.partial, partial, version
                ):
                    partial = error.partial
                self._missed(engine, str(error))
                failure = str(error)
            self.num_retried += 1
        raise NoEngineLeft(
            f"{self._settings.max_tries} tries of one request, the last: {failure}; now "
            f"{self.describe()}"
        )

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[Pin]:
        """Keep the least loaded engine at the present version; one at a time.

        Raises:
            PinLost: fewer than two engines are healthy, so none can be spared.
        """
        assert self._pin is None, "one evaluation at a time"
        await holds(self._gate)
        healthy = self._healthy()
        if len(healthy) < 2:
            raise PinLost(f"no engine to spare for version {self.version}: {self.describe()}")
        self._pin = Pin(self.loads.least(healthy), self.version)
        try:
            yield self._pin
        finally:
            self._unpin()

    @property
    def pinned_engines(self) -> list[str]:
        """Engines that an update that begins now must leave out."""
        return [self._pin.engine] if self._pin else []

    async def generate_on(
        self, pin: Pin, prompt_ids: Sequence[int], sampling: SamplingSettings
    ) -> Completion:
        """Sample one completion with the weights of `pin` alone.

        Raises:
            PinLost: its engine broke, or other weights got into the completion.
        """

        async def pinned() -> list[str]:
            if pin != self._pin:
                raise PinLost(f"{pin.engine} is no longer kept at version {pin.version}")
            return [pin.engine]

        lease = await self._place(_demand(prompt_ids, sampling), self._pinned_turn, pinned)
        engine = self._engines[pin.engine]
        try:
            with lease, self.loads.one_more(engine.name):
                completion = await engine.generate(
                    prompt_ids,
                    sampling,
                    cache_salt=f"v{pin.version}",
                    on_tokens=lease.counting(None),
                )
        except EngineError as error:
            self._missed(engine, str(error))
            raise PinLost(f"{pin.engine}, kept at version {pin.version}: {error}") from error
        if any(span.version != pin.version for span in completion.spans):
            raise PinLost(f"{pin.engine} sampled with other weights than version {pin.version}")
        return completion

    def describe(self) -> str:
        return "; ".join(str(status) for status in self.statuses.values()) or "no engines"

    def close_gate(self, version: int) -> None:
        """Hold back new requests: an update to `version` begins, and must end within its bound."""
        self._gate.clear()
        self._announced = version
        self.wants_update = False
        self._refresh()
        self._disarm()
        bound_s = self._settings.update_bound_s
        loop = asyncio.get_running_loop()
        self._watchdog = loop.call_later(bound_s, self._lose_update, version, bound_s)

    def open_gate(self, version: int, serving: Iterable[str] | None = None) -> None:
        """The engines named `serving`, or all, hold `version` now; others get no requests."""
        self._disarm()
        self.version = self._announced = version
        chosen = set(self._engines if serving is None else serving)
        if self._pin and self._pin.engine in chosen:
            self._pin = None  # it was needed: no other engine could be updated
        for name, engine in self._engines.items():
            if name in self.pinned_engines:
                continue
            if name in chosen:
                self._stop_examining(name)
                self._note(name, EngineEvent.UPDATED, f"version {version}")
            else:
                self._note(name, EngineEvent.DOUBTFUL, f"did not get version {version}")
                engine.interrupt()
                self._start_examining(engine)
        self._gate.set()
        self._refresh()

    async def close(self) -> None:
        """End what the pool does in the background."""
        self._disarm()
        tasks = [*self._examining.values(), *self._errands]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _place(
        self, demand: Demand, turn: asyncio.Lock, usable: Callable[[], Awaitable[list[str]]]
    ) -> Lease:
        """A place on the least loaded of the `usable` engines that have room for the request.

        First come, first served: a large request is not overtaken for ever by small ones.
        """
        async with turn:
            while True:
                roomy = [name for name in await usable() if self.kv.has_room(name, demand)]
                if roomy:
                    return self.kv.lease(self.loads.least(roomy), demand)
                await self.kv.changed()

    async def _usable(self) -> list[str]:
        try:
            async with asyncio.timeout(self._settings.wait_s):
                await holds(self._available)
        except TimeoutError:
            waited = f"no engine for {self._settings.wait_s:g} s"
            raise NoEngineLeft(f"{waited}: {self.describe()}") from None
        healthy = [name for name in self._healthy() if name not in self.pinned_engines]
        if not healthy:
            raise NoEngineLeft(f"every engine is beyond its restarts: {self.describe()}")
        return healthy

    def _healthy(self) -> list[str]:
        return [n for n, s in self.statuses.items() if s.state is EngineState.HEALTHY]

    def _refresh(self) -> None:
        """Let requests through, or wait: for the gate, or for an engine that may come back."""
        self.kv.look_again()
        lost = bool(self.statuses) and all(map(self._is_given_up, self.statuses.values()))
        usable = set(self._healthy()) - set(self.pinned_engines)
        if self._gate.is_set() and (usable or lost):
            self._available.set()
        else:
            self._available.clear()

    def _unpin(self) -> None:
        pin, self._pin = self._pin, None
        if pin and pin.engine in self.statuses and pin.version != self.version:
            why = f"was kept at version {pin.version}"
            if self.statuses[pin.engine].state is EngineState.HEALTHY:
                self._note(pin.engine, EngineEvent.DOUBTFUL, why)
        self._refresh()

    def _is_given_up(self, status: EngineStatus) -> bool:
        restarts_left = status.num_restarts < self._settings.max_restarts
        return status.state is EngineState.DEAD and not restarts_left

    def _is_sound(
        self, engine: Engine, got: Completion, partial: Completion | None, version: int
    ) -> bool:
        """Whether the new tokens come from `version` or a later one of ours.

        If not, the server was restarted unnoticed, or others write to it: only an update helps.
        """
        num_kept = len(partial.output_ids) if partial else 0
        new = (span.version for span in got.spans if span.end > num_kept)
        other = [each for each in new if not version <= each <= self._announced]
        if not other:
            return True
        why = f"sampled with version {other[0]} when it was to hold {version}"
        self._note(engine.name, EngineEvent.DOUBTFUL, why)
        return False

    def _missed(self, engine: Engine, why: str) -> None:
        self._note(engine.name, EngineEvent.MISSED, why)
        self._start_examining(engine)

    def _start_examining(self, engine: Engine) -> None:
        running = self._examining.get(engine.name)
        if engine.name in self.statuses and (running is None or running.done()):
            self._examining[engine.name] = asyncio.create_task(self._examine(engine))

    async def _examine(self, engine: Engine) -> None:
        """Find out whether an engine lives; see a dead one through its restarts."""
        name = engine.name
        try:
            await engine.wait_ready(self._settings.suspect_s)
            held = await engine.weight_version()
        except EngineError as error:
            self._note(name, EngineEvent.SILENT, str(error))
        else:
            suspect = self.statuses[name].state is EngineState.SUSPECT
            intact = suspect and self.is_open and held == self.version
            event = EngineEvent.INTACT if intact else EngineEvent.DOUBTFUL
            self._note(name, event, f"answers, holds version {held}")
            self.wants_update |= not intact
            return
        while not self._is_given_up(self.statuses[name]):
            self._note(name, EngineEvent.RESTART, self.statuses[name].why)
            await self._restart(name)
            try:
                await engine.wait_ready(self._settings.restart_s)
            except EngineError as error:
                self._note(name, EngineEvent.SILENT, str(error))
            else:
                self._note(name, EngineEvent.UP, "answers again, not updated yet")
                self.wants_update = True
                return

    def _lose_update(self, version: int, bound_s: float) -> None:
        """The sender is gone: what engines hold is unknown, and they stay paused.

        Their sessions are closed, so that another sender can begin; its full update resumes them
        with all requests that they still hold.
        """
        self._watchdog = None
        self.num_lost_updates += 1
        why = f"update to version {version} did not end within {bound_s:g} s: its sender is lost"
        for name, engine in self._engines.items():
            self._note(name, EngineEvent.DOUBTFUL, why)
            if self.statuses[name].state is EngineState.STALE:
                self._run_errand(self._abandon(engine))

    async def _abandon(self, engine: Engine) -> None:
        try:
            await engine.abandon_update()
        except EngineError as error:
            self._note(engine.name, EngineEvent.SILENT, str(error))

    def _run_errand(self, errand: Any) -> None:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _stop_examining(self, name: str) -> None:
        if task := self._examining.pop(name, None):
            task.cancel()

    def _disarm(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _note(self, name: str, event: EngineEvent, why: str) -> None:
        if name not in self.statuses:
            return  # it has left
        before = self.statuses[name]
        self.statuses[name] = before.after(event, why, time.monotonic())
        if self.statuses[name].state is not before.state:
            log.info("%s, was %s", self.statuses[name], before.state)
        self._refresh()


def _demand(
    prompt_ids: Sequence[int], sampling: SamplingSettings, partial: Completion | None = None
) -> Demand:
    num_done = len(partial.output_ids) if partial else 0
    return Demand(len(prompt_ids), num_done, sampling.max_new_tokens)
