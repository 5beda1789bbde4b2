"""An SGLang server in a thread: its control protocol, a real gloo rank, and faults on demand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from aiohttp import web

from megatron_magistral.rollout.engine import TensorSpec
from megatron_magistral.rollout.sglang_plugin import ACTION_PREFIX, STATE_KEY
from megatron_magistral.rollout.sglang_receive import Receiver
from megatron_magistral.rollout.sglang_weights import Placement
from megatron_magistral.weights.checksum import digest, head
from megatron_magistral.weights.flatten import FlatBucket, unflatten
from megatron_magistral.weights.store_group import Channels, channel_names, part_name

GROUP_TIMEOUT = timedelta(seconds=3)
# Questions of the plan `direct`, which SGLang gets as actions of one path.
JOIN, LEAVE, RECEIVE = (f"/weights_checker:{kind}" for kind in ("join", "leave", "receive"))
DELAY_S = 0.5


class Fault(StrEnum):
    REFUSE = "refuse"  # HTTP 400
    HANG = "hang"  # no answer
    DIE = "die"  # the connection breaks and nobody listens any more
    CORRUPT = "corrupt"  # answers as if all were well, and flips a bit of the weights
    LOSE = "lose"  # answers as if all were well, and has the weights from before
    DELAY = "delay"  # does it, after a while


@dataclass(frozen=True)
class Ok:
    """Success with a message of its own."""

    message: str


class FakeEngine:
    """Holds weights, a version, a pause and an update session, like one SGLang server with TP 1.

    `parameters` are shapes and dtypes that its model has; without any, those that are asked for.
    `faults` maps a path to what happens there, after as many calls as `sound_calls` says, if it
    does; `calls` lists the paths in order. The plan `direct` has paths of its own, see `RECEIVE`.
    `/generate` sends the raw bytes of `script` and then ends the stream, or stalls if `stall` is
    set.
    """

    def __init__(
        self,
        script: Sequence[bytes] = (),
        *,
        stall: bool = False,
        port: int = 0,
        parameters: Mapping[str, tuple[tuple[int, ...], str]] = {},
    ) -> None:
        self.script = script
        self.stall = stall
        self.faults: dict[str, Fault] = {}
        self.sound_calls: dict[str, int] = {}
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.version = "default"
        self.paused = False
        self.session_open = False
        self.parameters = dict(parameters)
        self.linked: list[str] = []  # parameters that its loader would fill from others
        self.info: dict[str, Any] = {
            "version": "0.5.23",
            "internal_states": [{STATE_KEY: {"active": True}}],
        }
        self._groups: dict[str, Any] = {}
        self._receiver = _Receiver(rank=0)
        self._placement = Placement()
        self._turn = asyncio.Lock()  # SGLang takes control calls in the order in which they come
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port: int = self._run(self._listen(port))

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

    async def _listen(self, port: int) -> int:
        app = web.Application(middlewares=[self._fault])
        for path in ("/health", "/server_info", "/model_info"):
            app.router.add_get(path, self._status)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/{control}", self._control)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        return self._runner.addresses[0][1]

    async def _die(self) -> None:
        self._groups.clear()
        self._receiver.forget()
        await self._runner.cleanup()

    @web.middleware
    async def _fault(self, request: web.Request, handler: Any) -> web.StreamResponse:
        path = await _path_of(request)
        self.calls.append(path)
        is_due = self.calls.count(path) > self.sound_calls.get(path, 0)
        match self.faults.get(path) if is_due else None:
            case Fault.REFUSE:
                return web.json_response({"success": False, "message": "refused"}, status=400)
            case Fault.HANG:
                await asyncio.sleep(3600)
            case Fault.CORRUPT:
                response = await handler(request)
                next(iter(self.weights.values())).view(torch.uint8).view(-1)[0] += 1
                return response
            case Fault.LOSE:
                before = {name: tensor.clone() for name, tensor in self.weights.items()}
                response = await handler(request)
                self.weights = before
                return response
            case Fault.DELAY:
                await asyncio.sleep(DELAY_S)
            case Fault.DIE:
                request.transport.abort()
                asyncio.get_running_loop().create_task(self._die())
        return await handler(request)

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self.info | {"weight_version": self.version})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        self.requests.append(payload)
        if not payload.get("stream"):
            return web.json_response(self._score(payload["input_ids"]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for data in self.script:
            await response.write(data)
            await asyncio.sleep(0)
        if self.stall:
            await asyncio.sleep(3600)
        return response

    def _score(self, ids: Sequence[int]) -> dict[str, Any]:
        """Every token but the first has log-probability -1."""
        logprobs = [[None if i == 0 else -1.0, token, None] for i, token in enumerate(ids)]
        meta = {"weight_version": self.version, "input_token_logprobs": logprobs}
        return {"meta_info": meta}

    async def _control(self, request: web.Request) -> web.Response:
        payload = await request.json()
        handle = getattr(self, request.path.removeprefix("/"))
        async with self._turn:
            refusal = await asyncio.to_thread(handle, payload)
        if isinstance(refusal, Ok):
            return web.json_response({"success": True, "message": refusal.message})
        content = {"success": refusal is None, "message": refusal or "ok"}
        return web.json_response(content, status=200 if refusal is None else 400)

    def init_weights_update_group(self, payload: dict[str, Any]) -> str | None:
        store = dist.TCPStore(payload["master_address"], payload["master_port"], None, False)
        rank, world_size = payload["rank_offset"], payload["world_size"]
        name = payload["group_name"]
        self._groups[name] = gloo_at_store(store, name, rank, world_size)
        return None

    def destroy_weights_update_group(self, payload: dict[str, Any]) -> str | None:
        self._groups.pop(payload["group_name"], None)
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
        if (group := self._groups.get(payload["group_name"])) is None:
            return "no such group"  # it has died meanwhile
        assert payload["flush_cache"] is False and payload["load_format"] == "flattened_bucket"
        columns = zip(payload["names"], payload["shapes"], payload["dtypes"], strict=True)
        specs = tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in columns)
        sizes = [torch.Size(s.shape).numel() * getattr(torch, s.dtype).itemsize for s in specs]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        try:
            group.broadcast(data, 0).wait()
        except RuntimeError as error:
            return f"Failed to receive weights: {error}"
        self.weights.update(unflatten(FlatBucket(specs, data)))
        return None

    def weights_checker(self, payload: dict[str, Any]) -> str | Ok:
        try:
            return Ok(json.dumps([self._answer(_question(payload))]))
        except (RuntimeError, ValueError) as error:
            return str(error)

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        match question:
            case {"place": specs}:
                placement = self._place(specs)
                self._placement = msgspec.convert(placement, Placement)
                return placement
            case {"digest": names, "heads": heads}:
                found = {name: [int(digest(self.weights[name]))] for name in names}
                return found | {name: [int(digest(head(self.weights[name])))] for name in heads}
            case {"join": group}:
                self._receiver.join(group)
            case {"leave": name}:
                self._receiver.leave(name)
            case {"receive": {"group": group, "names": names}}:
                if not self.session_open:
                    raise RuntimeError("no session")
                for name in names:
                    (copy,) = self._placement.copies[name]
                    empty = torch.zeros(copy.target.size, dtype=getattr(torch, copy.dtype))
                    self.weights.setdefault(name, empty)
                model = SimpleNamespace(named_parameters=self.weights.items)
                self._receiver.receive(model, self._placement, group, names)
        return {}

    def _place(self, specs: list[dict[str, Any]]) -> dict[str, Any]:
        asked = {spec["name"]: (tuple(spec["shape"]), spec["dtype"]) for spec in specs}
        held = self.parameters or asked
        placement: dict[str, Any] = {"copies": {}, "refused": {}, "unfilled": {}}
        placement["linked"] = self.linked
        for name, (shape, _) in asked.items():
            placement["copies"][name] = []
            if name in held and held[name][0] != shape:
                placement["refused"][name] = f"the model's is {held[name][0]}"
            elif name in held:
                view = {"size": shape, "stride": torch.empty(shape).stride(), "offset": 0}
                copy = {"parameter": name, "dtype": held[name][1], "source": view, "target": view}
                placement["copies"][name] = [copy]
        placement["unfilled"] = {
            name: torch.Size(shape).numel()
            for name, (shape, _) in held.items()
            if name not in asked
        }
        return placement

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


class _Receiver(Receiver):
    """In the process of the sender."""

    def join(self, group: Mapping[str, Any]) -> None:
        self._timeout_s = GROUP_TIMEOUT.total_seconds()
        store = dist.TCPStore(group["host"], group["port"], None, False)
        names = channel_names(part_name(group["name"], 0), group["backend"])
        groups = [gloo_at_store(store, name, group["rank"], group["world_size"]) for name in names]
        self._groups[group["name"]] = Channels(groups)

    def leave(self, name: str) -> None:
        self._groups.pop(name, None)

    def forget(self) -> None:
        self._groups.clear()


def gloo_at_store(store: dist.Store, name: str, rank: int, world_size: int) -> Any:
    """As torch's helper makes it, which knows each name only once in a process."""
    for prefix in (name, f"{name}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, rank, world_size, GROUP_TIMEOUT)


def _question(payload: dict[str, Any]) -> dict[str, Any]:
    return json.loads(payload["action"].removeprefix(ACTION_PREFIX))


async def _path_of(request: web.Request) -> str:
    """With the kind of a question of the plan `direct`."""
    if request.path == "/weights_checker":
        kind, *_ = _question(await request.json())
        if (path := f"{request.path}:{kind}") in (JOIN, LEAVE, RECEIVE):
            return path
    return request.path
