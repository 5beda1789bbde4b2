"""The controller's HTTP desk, where trainers announce weights, pull their share and acknowledge it.

    POST /start                         where the stage goes on; comes first
    PUT  /weights/{version}             an update to `version` begins: hold back new requests
    POST /weights/{version}             generators hold `version`: let requests through to them;
                                        the body lists their names, without one all of them do
    GET  /steps/{step}/shares/{rank}    minibatches of one data-parallel rank; 204: not ready yet
    POST /steps/{step}/trained          the step is trained; the body holds the trainer's metrics

A step is handed out in order and stays available until it is acknowledged, to every process of a
data-parallel replica that asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.types import Batch, Minibatch, Progress

LONG_POLL_S = 20.0


class Desk:
    """State between trainers and pipeline. `next_batch(step)` makes a batch; it may wait."""

    def __init__(
        self,
        pool: EnginePool,
        next_batch: Callable[[int], Coroutine[Any, Any, Batch]],
        on_trained: Callable[[int, dict[str, float]], None],
        num_steps: int,
    ) -> None:
        self._pool = pool
        self._next_batch = next_batch
        self._on_trained = on_trained
        self._num_steps = num_steps
        self._step = 0
        self._start: asyncio.Future[Progress] = asyncio.get_running_loop().create_future()
        self._turn = asyncio.Condition()
        self._open = asyncio.Event()
        self._batch: asyncio.Task[Batch] | None = None
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def started(self) -> Progress:
        """Wait for the trainers to say where the stage goes on."""
        return await self._start

    def open(self) -> None:
        """Begin to hand out batches."""
        self._open.set()

    async def finished(self) -> None:
        """Wait until every step is trained and the last weights are in the generators.

        Raises what `next_batch` raised, if it did.
        """
        await self._finished

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
            ]
        )
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield
        finally:
            await runner.cleanup()

    async def _begin(self, request: web.Request) -> web.Response:
        if self._start.done():
            raise web.HTTPConflict(text=f"the stage has started at step {self._step} already")
        progress = msgspec.json.decode(await request.read(), type=Progress)
        self._step = progress.next_step
        self._start.set_result(progress)
        return web.Response(status=204)

    async def _begin_update(self, request: web.Request) -> web.Response:
        self._pool.close_gate(int(request.match_info["version"]))
        return web.Response(status=204)

    async def _end_update(self, request: web.Request) -> web.Response:
        version = int(request.match_info["version"])
        body = await request.read()
        self._pool.open_gate(version, msgspec.json.decode(body, type=list[str]) if body else None)
        if version == self._num_steps and not self._finished.done():
            self._finished.set_result(None)
        return web.Response(status=204)

    async def _share(self, request: web.Request) -> web.Response:
        step, rank = int(request.match_info["step"]), int(request.match_info["rank"])
        if step < self._step:
            raise web.HTTPConflict(text=f"step {step} is trained already")
        try:
            async with asyncio.timeout(LONG_POLL_S):
                await self._open.wait()
                async with self._turn:
                    # A rank may ask before another has acknowledged the step that both trained.
                    await self._turn.wait_for(lambda: self._step >= step)
                if self._batch is None:
                    self._batch = asyncio.create_task(self._next_batch(step))
                    self._batch.add_done_callback(self._notice_failure)
                batch = await asyncio.shield(self._batch)
        except TimeoutError:
            return web.Response(status=204)
        return web.Response(body=msgspec.msgpack.encode(share(batch, rank)))

    def _notice_failure(self, batch: asyncio.Task[Batch]) -> None:
        error = None if batch.cancelled() else batch.exception()
        if error is not None and not self._finished.done():
            self._finished.set_exception(error)

    async def _trained(self, request: web.Request) -> web.Response:
        step = int(request.match_info["step"])
        if step != self._step:
            raise web.HTTPConflict(text=f"step {self._step} is being trained, not step {step}")
        metrics = msgspec.json.decode(await request.read(), type=dict[str, float])
        self._on_trained(step, metrics)
        async with self._turn:
            self._step, self._batch = step + 1, None
            self._turn.notify_all()
        return web.Response(status=204)


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
    return Batch(batch.step, tuple(minibatches), batch.ordinals)
