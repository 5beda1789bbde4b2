"""Slots: who may run when. As many as cores, so that waiting happens before any clock starts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

from verifier_sandbox.jail.launcher import Jail, Launcher, LauncherDiedError

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
_T = TypeVar("_T")
_Waiter = tuple[asyncio.Future["Slot"], bool]
"""Who gets a slot, and whether it must be the only one."""


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
    """Hands out slots in order of arrival; an exclusive holder has the whole pool to itself.

    Work already begun goes before what is new, but after as many of its kind in a row as there
    are slots, one that is new has its turn. `admission` bounds all that is unfinished.
    """

    def __init__(self, jail: Jail, num_slots: int, max_queue: int | None = None) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self._jail = jail
        self._num_slots = num_slots
        self._max_queue = 64 * num_slots if max_queue is None else max_queue
        self._slots: list[Slot] = []
        self._idle: list[Slot] = []
        self._begun: deque[_Waiter] = deque()
        self._new: deque[_Waiter] = deque()
        self._num_begun_in_a_row = 0
        self._num_unfinished = 0
        self._exclusive = False
        self._mean_hold_s = 1.0

    def start(self) -> None:
        """Starts every slot. Raises OSError if a launcher cannot be started."""
        for index in range(self._num_slots):
            self._slots.append(Slot(self._jail, index))
        self._idle = list(self._slots)

    def close(self) -> None:
        """Ends every launcher and what it runs."""
        for future, _ in (*self._begun, *self._new):
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
        """Who asks for a slot now; a submission does so for each of its stages."""
        return len(self._begun) + len(self._new)

    @property
    def num_unfinished(self) -> int:
        """Submissions admitted and not yet answered, whatever they wait for."""
        return self._num_unfinished

    @property
    def num_restarts(self) -> int:
        return sum(slot.num_restarts for slot in self._slots)

    @contextlib.contextmanager
    def admission(self) -> Iterator[None]:
        """Held by a submission until it is answered.

        Raises OverloadedError if a slot each and the queue are taken.
        """
        if self._num_unfinished >= self._num_slots + self._max_queue:
            wait_s = self._num_unfinished / self._num_slots * self._mean_hold_s
            raise OverloadedError(max(1.0, wait_s / 2))
        self._num_unfinished += 1
        try:
            yield
        finally:
            self._num_unfinished -= 1

    @contextlib.asynccontextmanager
    async def slot(self, exclusive: bool = False, first: bool = False) -> AsyncIterator[Slot]:
        """A slot of one's own. `first` is for work already begun; `exclusive` work counts as such,
        and runs while no other does."""
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        queue = self._begun if first or exclusive else self._new
        queue.append((future, exclusive))
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
        while self._idle and not self._exclusive and (queue := self._next_queue()):
            future, exclusive = queue[0]
            if future.done():
                queue.popleft()
                continue
            if exclusive and len(self._idle) < self._num_slots:
                return
            queue.popleft()
            self._num_begun_in_a_row = self._num_begun_in_a_row + 1 if queue is self._begun else 0
            self._exclusive = exclusive
            future.set_result(self._idle.pop())

    def _next_queue(self) -> deque[_Waiter]:
        is_turn_of_new = self._new and self._num_begun_in_a_row >= self._num_slots
        return self._begun if self._begun and not is_turn_of_new else self._new
