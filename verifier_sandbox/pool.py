"""Slots: who may run when. As many as cores, so that waiting happens before any clock starts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from verifier_sandbox.jail.launcher import Jail, Launcher, LauncherDiedError

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
_T = TypeVar("_T")


class OverloadedError(RuntimeError):
    """The queue is full; come back after `retry_after_s`."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"queue full, retry after {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class Slot:
    """One launcher, replaced when it dies."""

    def __init__(self, jail: Jail, index: int) -> None:
        self._jail = jail
        self.index = index
        self.launcher = Launcher.start(jail, index)
        self.num_restarts = 0

    def restart(self) -> None:
        self.launcher.kill()
        self.launcher.close()
        self.num_restarts += 1
        self.launcher = Launcher.start(self._jail, self.index)

    async def attempt(
        self, work: Callable[[Launcher], Awaitable[_T]], on_retry: Callable[[], None]
    ) -> _T:
        """Does `work`, again on a fresh launcher if that one dies.

        Raises LauncherDiedError after `MAX_ATTEMPTS`, OSError if no launcher can be started.
        """
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            try:
                return await work(self.launcher)
            except LauncherDiedError as error:
                log.warning("slot %d: %s; %d attempts left", self.index, error, attempts_left)
                self.restart()
                if attempts_left == 0:
                    raise
                on_retry()
        raise AssertionError("unreachable")


class SlotPool:
    """Hands out slots in order of arrival; an exclusive holder has the whole pool to itself."""

    def __init__(self, jail: Jail, num_slots: int, max_queue: int | None = None) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self._jail = jail
        self._num_slots = num_slots
        self._max_queue = 64 * num_slots if max_queue is None else max_queue
        self._slots: list[Slot] = []
        self._idle: list[Slot] = []
        self._waiting: deque[tuple[asyncio.Future[Slot], bool]] = deque()
        self._exclusive = False
        self._mean_hold_s = 1.0

    def start(self) -> None:
        """Starts every slot. Raises OSError if a launcher cannot be started."""
        for index in range(self._num_slots):
            self._slots.append(Slot(self._jail, index))
        self._idle = list(self._slots)

    def close(self) -> None:
        """Ends every launcher and what it runs."""
        for future, _ in self._waiting:
            future.cancel()
        for slot in self._slots:
            slot.launcher.close()
        self._slots, self._idle = [], []

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def num_busy(self) -> int:
        return len(self._slots) - len(self._idle)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_restarts(self) -> int:
        return sum(slot.num_restarts for slot in self._slots)

    def admit(self) -> None:
        """Raises OverloadedError if the queue is full."""
        if self.num_waiting >= self._max_queue:
            wait_s = self.num_waiting / self._num_slots * self._mean_hold_s
            raise OverloadedError(max(1.0, wait_s / 2))

    @contextlib.asynccontextmanager
    async def slot(self, exclusive: bool = False, first: bool = False) -> AsyncIterator[Slot]:
        """A slot of one's own. `first` is for work already begun; `exclusive` work goes first too,
        and runs while no other does."""
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        join = self._waiting.appendleft if first or exclusive else self._waiting.append
        join((future, exclusive))
        self._dispatch()
        try:
            slot = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release(future.result(), exclusive)
            self._dispatch()
            raise
        begin = time.monotonic()
        try:
            yield slot
        finally:
            self._mean_hold_s += 0.05 * (time.monotonic() - begin - self._mean_hold_s)
            self._release(slot, exclusive)

    def _release(self, slot: Slot, exclusive: bool) -> None:
        if exclusive:
            self._exclusive = False
        if slot in self._slots:
            self._idle.append(slot)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._waiting and self._idle and not self._exclusive:
            future, exclusive = self._waiting[0]
            if future.done():
                self._waiting.popleft()
                continue
            if exclusive and len(self._idle) < self._num_slots:
                return
            self._waiting.popleft()
            self._exclusive = exclusive
            future.set_result(self._idle.pop())
