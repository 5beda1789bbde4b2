"""An SGLang server in a thread: its control protocol, a real gloo rank, and faults on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web

from megatron_magistral.rollout.engine import TensorSpec
from megatron_magistral.weights.flatten import FlatBucket, unflatten

GROUP_TIMEOUT = timedelta(seconds=20)


class Fault(StrEnum):
    REFUSE = "refuse"  # HTTP 400
    HANG = "hang"  # no answer
    DIE = "die"  # the connection breaks and nobody listens any more


class FakeEngine:
    """Holds weights, a version, a pause and an update session, like one SGLang server with TP 1.

    `faults` maps a path to what happens there, `calls` lists the paths in order. `/generate` sends
    the raw bytes of `script` and then ends the stream, or stalls if `stall` is set.
    """

    def __init__(self, script: Sequence[bytes] = (), *, stall: bool = False) -> None:
        self.script = script
        self.stall = stall
        self.faults: dict[str, Fault] = {}
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.version = "default"
        self.paused = False
        self.session_open = False
        self.info: dict[str, Any] = {"disable_overlap_schedule": True}
        self._group: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port: int = self._run(self._listen())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._run(self._die())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _listen(self) -> int:
        app = web.Application(middlewares=[self._fault])
        for path in ("/health", "/server_info", "/model_info"):
            app.router.add_get(path, self._status)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/{control}", self._control)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return self._runner.addresses[0][1]

    async def _die(self) -> None:
        self._group = None
        await self._runner.cleanup()

    @web.middleware
    async def _fault(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path)
        match self.faults.get(request.path):
            case Fault.REFUSE:
                return web.json_response({"success": False, "message": "refused"}, status=400)
            case Fault.HANG:
                await asyncio.sleep(3600)
            case Fault.DIE:
                request.transport.abort()
                asyncio.get_running_loop().create_task(self._die())
        return await handler(request)

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self.info | {"weight_version": self.version})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for data in self.script:
            await response.write(data)
            await asyncio.sleep(0)
        if self.stall:
            await asyncio.sleep(3600)
        return response

    async def _control(self, request: web.Request) -> web.Response:
        payload = await request.json()
        handle = getattr(self, request.path.removeprefix("/"))
        refusal = await asyncio.to_thread(handle, payload)
        content = {"success": refusal is None, "message": refusal or "ok"}
        return web.json_response(content, status=200 if refusal is None else 400)

    def init_weights_update_group(self, payload: dict[str, Any]) -> str | None:
        name, world_size = payload["group_name"], payload["world_size"]
        store = dist.TCPStore(payload["master_address"], payload["master_port"], world_size, False)
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        rank = payload["rank_offset"]
        self._group = dist.ProcessGroupGloo(store, rank, world_size, GROUP_TIMEOUT)
        return None

    def destroy_weights_update_group(self, payload: dict[str, Any]) -> str | None:
        self._group = None
        return None

    def pause_generation(self, payload: dict[str, Any]) -> str | None:
        assert payload == {"mode": "in_place"}
        self.paused = True
        return None

    def begin_weight_update(self, payload: dict[str, Any]) -> str | None:
        if self.session_open:
            return "a weight-update session is already open"
        self.session_open = True
        return None

    def update_weights_from_distributed(self, payload: dict[str, Any]) -> str | None:
        if not self.session_open:
            return "no session"
        assert payload["flush_cache"] is False and payload["load_format"] == "flattened_bucket"
        columns = zip(payload["names"], payload["shapes"], payload["dtypes"], strict=True)
        specs = tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in columns)
        sizes = [torch.Size(s.shape).numel() * getattr(torch, s.dtype).itemsize for s in specs]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        try:
            self._group.broadcast(data, 0).wait()
        except RuntimeError as error:
            return f"Failed to receive weights: {error}"
        self.weights.update(unflatten(FlatBucket(specs, data)))
        return None

    def update_weight_version(self, payload: dict[str, Any]) -> str | None:
        assert payload["abort_all_requests"] is False
        self.version = payload["new_version"]
        return None

    def end_weight_update(self, payload: dict[str, Any]) -> str | None:
        was_open, self.session_open = self.session_open, False
        return None if was_open else "no weight-update session is open"

    def continue_generation(self, payload: dict[str, Any]) -> str | None:
        assert payload == {"torch_empty_cache": False}
        self.paused = False
        return None
