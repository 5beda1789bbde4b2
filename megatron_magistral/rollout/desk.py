"""The controller's HTTP desk, where trainers announce weights, pull their share and acknowledge it.

    POST /start?attempt=A               where the stage goes on; comes first, and again when
                                        trainers begin anew; 202: not ready yet, ask again
    PUT  /weights/{version}             an update to `version` begins: hold back new requests;
                                        the answer lists engines that it is to leave out
    POST /weights/{version}             generators hold `version`: let requests through to them;
                                        the body lists their names, without one all of them do
    GET  /steps/{step}/shares/{rank}?updates=N
                                        minibatches of one data-parallel rank; or else
                                        204: not ready yet, the header says what it waits for
                                        205: publish the present weights once more (see below)
                                        410: the run is to stop; save, and end
    POST /steps/{step}/trained          the step is trained; the body holds the trainer's metrics
    GET  /metrics                       for Prometheus

A step is handed out in order and stays available until it is acknowledged, to every process of a
data-parallel replica that asks for it. What one rank is told of a step, all of them are: once one
has its share, nobody is told to stop or to publish before the next step.

An engine that was restarted serves nothing before it has got all weights. If trainers wait for a
batch, it need not wait for the next step: they are told to publish once more, each rank as soon as
it asks again. A rank says how often it has done so in this step (`updates`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.rollout.prometheus import CONTENT_TYPE_LATEST
from megatron_magistral.types import Batch, Minibatch, Progress

LONG_POLL_S = 20.0
LOOK_S = 0.1  # between two looks at what no event tells of
WAITING_HEADER = "Waiting-For"
# An engine that cannot be updated must not keep trainers busy with trying.
REPUBLISH_PAUSE_S = 10.0


async def ignore_weights(version: int) -> None:
    """For a desk whose owner need not know which weights generators hold."""


@dataclass
class Handout:
    """What becomes of one step: its batch, and what ranks were told before they got it."""

    batch: asyncio.Task[Batch] | None = None
    num_updates: int = 0
    is_handed_out: bool = False
    encoded: dict[int, bytes] = field(default_factory=dict)
    """By rank: every process of a replica asks for the same."""


@dataclass
class _Start:
    attempt: str
    progress: Progress
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)


class Desk:
    """State between trainers and pipeline. `next_batch(step)` makes a batch; it may wait."""

    def __init__(
        self,
        pool: EnginePool,
        next_batch: Callable[[int], Coroutine[Any, Any, Batch]],
        on_trained: Callable[[int, dict[str, float]], None],
        num_steps: int,
        *,
        on_weights: Callable[[int], Awaitable[None]] = ignore_weights,
        waiting_for: Callable[[], str] = lambda: "",
        exposition: Callable[[], bytes] = lambda: b"",
    ) -> None:
        self._pool = pool
        self._next_batch = next_batch
        self._on_trained = on_trained
        self._on_weights = on_weights
        self._waiting_for = waiting_for
        self._exposition = exposition
        self._num_steps = num_steps
        self._step = 0
        self._handout = Handout()
        self._turn = asyncio.Condition()
        self._open = asyncio.Event()
        self._stopping = asyncio.Event()
        self._republished_at = -REPUBLISH_PAUSE_S
        self._begun = asyncio.Event()
        self._start = _Start("none yet", Progress())
        self._awaited = self._start
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def started(self) -> Progress:
        """Wait for the trainers to say where the stage goes on. They wait for `go_on`."""
        await self._begun.wait()
        self._begun.clear()
        self._awaited = self._start
        self._close()  # what the start before this one had going may just have opened it
        self._step, self._handout = self._start.progress.next_step, Handout()
        return self._start.progress

    def go_on(self) -> None:
        """Let the trainers begin: what comes from them now belongs to the new start."""
        self._awaited.is_ready.set()

    def open(self) -> None:
        """Begin to hand out batches."""
        self._open.set()

    def stop(self) -> None:
        """Let no step begin any more."""
        self._stopping.set()

    async def finished(self) -> None:
        """Wait until every step is trained and the last weights are in the generators, or until
        the trainers begin anew: then `is_finished` is not true, and `started` tells from where.

        Raises what `next_batch` raised, if it did.
        """
        begun_anew = asyncio.create_task(self._begun.wait())
        ends: list[asyncio.Future[Any]] = [begun_anew, self._finished]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            begun_anew.cancel()
        if self._finished.done():
            self._finished.result()

    @property
    def is_finished(self) -> bool:
        return self._finished.done()

    @asynccontextmanager
    async def serve(self, host: str, port: int) -> AsyncIterator[None]:
        app = web.Application()
        app.add_routes(
            [
                web.post("/start", self._begin),
                web.put("/weights/{version}", self._begin_update),
                web.post("/weights/{version}", self._end_update),
                web.get("/steps/{step}/shares/{rank}", self._share),
                web.post("/steps/{step}/trained", self._trained),
                web.get("/metrics", self._metrics),
            ]
        )
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield
        finally:
            await runner.cleanup()

    # --- where the stage goes on ---------------------------------------------------------------

    async def _begin(self, request: web.Request) -> web.Response:
        attempt = request.query.get("attempt", "")
        progress = msgspec.json.decode(await request.read(), type=Progress)
        if self._start.attempt != attempt:
            self._start = _Start(attempt, progress)
            self._close()
            self._begun.set()
        start = self._start
        with suppress(TimeoutError):
            await asyncio.wait_for(start.is_ready.wait(), LONG_POLL_S)
        return web.Response(status=204 if start.is_ready.is_set() else 202)

    def _close(self) -> None:
        """Hand out nothing until it is known where the stage goes on."""
        self._open.clear()
        if self._handout.batch is not None:
            self._handout.batch.cancel()

    # --- weights -------------------------------------------------------------------------------

    async def _begin_update(self, request: web.Request) -> web.Response:
        self._pool.close_gate(int(request.match_info["version"]))
        return web.json_response(self._pool.pinned_engines)

    async def _end_update(self, request: web.Request) -> web.Response:
        version = int(request.match_info["version"])
        body = await request.read()
        self._pool.open_gate(version, msgspec.json.decode(body, type=list[str]) if body else None)
        await self._on_weights(version)
        self._look_whether_finished()
        return web.Response(status=204)

    # --- steps ---------------------------------------------------------------------------------

    async def _share(self, request: web.Request) -> web.Response:
        step, rank = int(request.match_info["step"]), int(request.match_info["rank"])
        num_updates = int(request.query.get("updates", "0"))
        self._check_open(step)
        try:
            async with asyncio.timeout(LONG_POLL_S):
                await self._open_or_stopping()
                async with self._turn:
                    # A rank may ask before another has acknowledged the step that both trained.
                    await self._turn.wait_for(lambda: self._step >= step)
                self._check_open(step)  # a request of trainers that died meanwhile goes on
                return await self._answer(self._handout, step, rank, num_updates)
        except TimeoutError:
            waiting_for = self._waiting_for().encode("ascii", "replace").decode()
            return web.Response(status=204, headers={WAITING_HEADER: waiting_for})

    def _check_open(self, step: int) -> None:
        if step < self._step:
            raise web.HTTPConflict(text=f"step {step} is trained already")

    async def _open_or_stopping(self) -> None:
        while not (self._open.is_set() or self._stopping.is_set()):
            await asyncio.sleep(LOOK_S)

    async def _answer(
        self, handout: Handout, step: int, rank: int, num_updates: int
    ) -> web.Response:
        """Waits until it is known what the ranks are to do."""
        while not handout.is_handed_out:
            if self._stopping.is_set():
                return web.Response(status=410, text="the run is to stop")
            if num_updates < handout.num_updates:
                return web.Response(status=205)
            if handout.batch is None:
                handout.batch = asyncio.create_task(self._next_batch(step))
                handout.batch.add_done_callback(self._notice_failure)
            if handout.batch.done():
                break
            if self._may_republish():
                handout.num_updates += 1
                self._republished_at = time.monotonic()
            else:
                await asyncio.wait([handout.batch], timeout=LOOK_S)
        assert handout.batch is not None
        batch = await asyncio.shield(handout.batch)
        handout.is_handed_out = True
        if rank not in handout.encoded:
            handout.encoded[rank] = msgspec.msgpack.encode(share(batch, rank))
        return web.Response(body=handout.encoded[rank])

    def _may_republish(self) -> bool:
        pause_s = time.monotonic() - self._republished_at
        return self._pool.is_open and self._pool.wants_update and pause_s > REPUBLISH_PAUSE_S

    def _notice_failure(self, batch: asyncio.Task[Batch]) -> None:
        if not batch.cancelled() and (error := batch.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The run ends with this, and not with a trainer that was answered a 500."""
        if not self._finished.done():
            self._finished.set_exception(error)

    async def _trained(self, request: web.Request) -> web.Response:
        step = int(request.match_info["step"])
        metrics = msgspec.json.decode(await request.read(), type=dict[str, float | None])
        if step != self._step:
            raise web.HTTPConflict(text=f"step {self._step} is being trained, not step {step}")
        # JSON knows no inf and no nan, which a step that was skipped may have for a loss.
        numbers = {name: math.nan if value is None else value for name, value in metrics.items()}
        try:
            self._on_trained(step, numbers)
        except OSError as error:  # a disk that is full, most likely
            self._fail(error)
            raise
        self._step, self._handout = step + 1, Handout()  # at once: trainers may begin anew
        async with self._turn:
            self._turn.notify_all()
        self._look_whether_finished()
        return web.Response(status=204)

    def _look_whether_finished(self) -> None:
        """The last step is acknowledged after its weights, but they may come once more."""
        is_last = self._step == self._num_steps == self._pool.version
        if is_last and not self._finished.done():
            self._finished.set_result(None)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def share(batch: Batch, rank: int) -> Batch:
    """The part of a batch that data-parallel rank `rank` trains."""
    minibatches = []
    for minibatch in batch.minibatches:
        mine = [i for i, owner in enumerate(minibatch.ranks) if owner == rank]
        minibatches.append(
            Minibatch(
                sequences=tuple(minibatch.sequences[i] for i in mine),
                ranks=tuple(minibatch.ranks[i] for i in mine),
            )
        )
    return msgspec.structs.replace(batch, minibatches=tuple(minibatches))
