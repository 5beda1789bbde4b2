"""A receiver in memory: an engine's side of an update without an engine.

It speaks the control protocol of an SGLang server with our plugin, joins the senders' groups, holds
one generator rank's part of every tensor, and loads into it as SGLang does. It computes nothing, so
it measures the wire and the protocol. Each tensor-parallel rank is a process; the first one of an
engine serves HTTP and hands every call to the others, which like SGLang take one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from torch import Tensor

from benchmarks.broadcast.memory import PeakMemory, Scratch
from benchmarks.broadcast.wires import BareWires
from megatron_magistral.rollout.engine import TensorSpec
from megatron_magistral.rollout.sglang_answers import RankAnswers
from megatron_magistral.rollout.sglang_plugin import ACTION_PREFIX, STATE_KEY
from megatron_magistral.rollout.sglang_server import NEWEST_TESTED_SGLANG
from megatron_magistral.weights.architecture import Architecture
from megatron_magistral.weights.buffers import wire_buffer
from megatron_magistral.weights.flatten import FlatBucket, unflatten
from megatron_magistral.weights.placement import (
    GeneratorLayout,
    TrainerLayout,
    needed,
    tensors,
)
from megatron_magistral.weights.store_group import join_at_store

COMMAND_TIMEOUT_S = 120.0


class MemoryModel(torch.nn.Module):
    """The parameters of one generator rank, by Hugging Face name with dots replaced."""

    def __init__(
        self,
        arch: Architecture,
        generator: GeneratorLayout,
        tp_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._cuts: dict[str, tuple[int, int, int]] = {}
        for tensor in tensors(arch, TrainerLayout()):
            mine = needed(tensor, generator, arch, tp_rank)
            if not len(mine):
                continue
            shape, axis = list(tensor.shape), tensor.axis or 0
            if tensor.axis is not None:
                shape[axis] = len(mine)
            start = mine.start if tensor.axis is not None else 0
            self._cuts[tensor.name] = (axis, start, shape[axis])
            values = torch.zeros(shape, dtype=dtype, device=device)
            self.register_parameter(
                _parameter_name(tensor.name), torch.nn.Parameter(values, requires_grad=False)
            )

    @torch.no_grad()
    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            if (cut := self._cuts.get(name)) is not None:
                self.get_parameter(_parameter_name(name)).copy_(tensor.narrow(*cut))


def _parameter_name(name: str) -> str:
    return name.replace(".", "/")


@dataclass
class EngineReport:
    """Seconds that one rank spent on the last update, processor time that the update, two parts of
    it and the bare broadcast before it took, and memory."""

    pause_s: float = 0.0
    receive_s: float = 0.0
    load_s: float = 0.0
    resume_s: float = 0.0
    paused_s: float = 0.0
    receive_cpu_s: float = 0.0
    load_cpu_s: float = 0.0
    cpu_s: float = 0.0
    bare_cpu_s: float = 0.0
    extra_bytes: int | None = None


class MemoryEngine:
    """One rank. `peers` is the group of the engine's ranks, `wires` is what the sender and those
    engine ranks that get the same bytes share."""

    def __init__(
        self,
        arch: Architecture,
        generator: GeneratorLayout,
        rank: int,
        peers: dist.ProcessGroup,
        wires: BareWires,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._tp_rank = rank % generator.tp
        self._tp = generator.tp
        self._peers = peers
        self._wires = wires
        self._device = device
        self._model = MemoryModel(arch, generator, self._tp_rank, dtype, device)
        self._answers = RankAnswers(self._tp_rank)
        self._groups: dict[str, dist.ProcessGroup] = {}  # by name, one of each sender
        self._version = "default"
        self._session_open = False
        self._buffer: Tensor | None = None
        self._scratch = Scratch(device)
        self._report = EngineReport()
        self._memory = PeakMemory(device)
        self._paused_at = self._loaded_at = 0.0
        self._num_updates = 0
        self._cpu_s = self._bare_cpu_s = 0.0
        self.is_done = False

    # --- control calls, the same on every rank; they return the message, and raise to refuse ----

    def init_weights_update_group(self, payload: dict[str, Any]) -> Any:
        timeout = timedelta(seconds=COMMAND_TIMEOUT_S)
        store = dist.TCPStore(
            payload["master_address"], payload["master_port"], is_master=False, timeout=timeout
        )
        self._groups[payload["group_name"]] = join_at_store(
            store,
            payload["group_name"],
            payload["rank_offset"] + self._tp_rank,
            payload["world_size"],
            payload["backend"],
            COMMAND_TIMEOUT_S,
        )

    def destroy_weights_update_group(self, payload: dict[str, Any]) -> Any:
        self._groups.pop(payload["group_name"], None)

    def pause_generation(self, payload: dict[str, Any]) -> Any:
        self._report = EngineReport(bare_cpu_s=self._bare_cpu_s)
        self._cpu_s = time.process_time()
        if self._num_updates == 0:  # later ones use the memory of the first one again
            self._memory.start()
        self._num_updates += 1
        self._paused_at = time.monotonic()

    def begin_weight_update(self, payload: dict[str, Any]) -> Any:
        if self._session_open:
            raise RuntimeError("a weight-update session is already open")
        self._session_open = True

    def update_weights_from_distributed(self, payload: dict[str, Any]) -> Any:
        start = time.monotonic()
        self._note_first(start)
        columns = zip(payload["names"], payload["shapes"], payload["dtypes"], strict=True)
        specs = tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in columns)
        sizes = [torch.Size(s.shape).numel() * getattr(torch, s.dtype).itemsize for s in specs]
        data = self._receive_buffer(sum(sizes))
        cpu_s = time.process_time()
        self._groups[payload["group_name"]].broadcast(data, 0).wait()
        received_at, received_cpu_s = self._now(), time.process_time()
        self._model.load_weights(unflatten(FlatBucket(specs, data)))
        self._loaded_at = self._now()
        self._report.receive_cpu_s += received_cpu_s - cpu_s
        self._report.load_cpu_s += time.process_time() - received_cpu_s
        self._report.receive_s += received_at - start
        self._report.load_s += self._loaded_at - received_at

    def _note_first(self, start: float) -> None:
        if not self._report.pause_s:
            self._report.pause_s = start - self._paused_at

    def _receive_buffer(self, num_bytes: int) -> Tensor:
        """The same memory for all buckets, as torch's cache gives it on a GPU."""
        if self._buffer is None or len(self._buffer) < num_bytes:
            self._buffer = None
            self._buffer = wire_buffer(num_bytes, self._device)
        return self._buffer[:num_bytes]

    def weights_checker(self, payload: dict[str, Any]) -> Any:
        start = time.monotonic()
        question = json.loads(payload["action"].removeprefix(ACTION_PREFIX))
        cpu_s = time.process_time()
        answer = self._answers.answer(self._model, question)
        if "receive" in question:
            self._note_first(start)
            self._loaded_at = self._now()
            self._report.receive_cpu_s += time.process_time() - cpu_s
            self._report.receive_s += self._loaded_at - start
        return answer

    def update_weight_version(self, payload: dict[str, Any]) -> Any:
        self._version = payload["new_version"]

    def end_weight_update(self, payload: dict[str, Any]) -> Any:
        if not self._session_open:
            raise RuntimeError("no weight-update session is open")
        self._session_open = False

    def continue_generation(self, payload: dict[str, Any]) -> Any:
        now = time.monotonic()
        self._report.resume_s = now - self._loaded_at
        self._report.paused_s = now - self._paused_at
        self._report.cpu_s = time.process_time() - self._cpu_s
        self._report.extra_bytes = self._memory.extra_bytes()

    def bare_broadcast(self, payload: dict[str, Any]) -> Any:
        """Not SGLang's: the baseline, the same bytes over the same ranks. With `copies`, this rank
        also copies its share out, as a loader must."""
        num_parts = payload["num_parts"]
        sizes = [size // num_parts for size in payload["sizes"]]
        buffers = self._scratch.buffers(sizes)
        num_shares = self._tp // num_parts
        shares = [size // num_shares if payload["copies"] else 0 for size in sizes]
        places = self._scratch.model(sum(shares)).split(shares)
        dist.barrier(self._wires.groups[0])
        cpu_s = time.process_time()
        for buffer, place in zip(buffers, places, strict=True):
            self._wires.receive(buffer, COMMAND_TIMEOUT_S, channels=payload["channels"])
            place.copy_(buffer[: len(place)])
        self._now()
        self._bare_cpu_s = time.process_time() - cpu_s

    def report(self, payload: dict[str, Any]) -> Any:
        return asdict(self._report)

    def shut_down(self, payload: dict[str, Any]) -> Any:
        self.is_done = True

    # --- one call at a time, on all ranks of the engine -----------------------------------------

    def call_everywhere(self, name: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """Run a call on every rank of the engine, from its first rank; every rank's outcome."""
        if self._tp > 1:
            first = dist.get_global_rank(self._peers, 0)
            dist.broadcast_object_list([(name, payload)], src=first, group=self._peers)
        return self._gathered(self._outcome(name, payload))

    def follow(self) -> None:
        """Take calls from the first rank until it shuts down."""
        first = dist.get_global_rank(self._peers, 0)
        while not self.is_done:
            call: list[Any] = [None]
            dist.broadcast_object_list(call, src=first, group=self._peers)
            self._gathered(self._outcome(*call[0]))

    def _outcome(self, name: str, payload: dict[str, Any]) -> dict[str, Any]:
        try:
            call: Callable[[dict[str, Any]], Any] = getattr(self, name)
            return {"answer": call(payload)}
        except Exception as error:
            # A worker's edge: the sender reads what failed, the others go on.
            return {"error": f"rank {self._tp_rank}: {type(error).__name__}: {error}"}

    def _gathered(self, outcome: dict[str, Any]) -> list[dict[str, Any]]:
        if self._tp == 1:
            return [outcome]
        outcomes: list[Any] = [None] * self._tp
        dist.all_gather_object(outcomes, outcome, group=self._peers)
        return outcomes

    def status(self) -> dict[str, Any]:
        return {
            "version": str(NEWEST_TESTED_SGLANG),
            "internal_states": [{STATE_KEY: {"active": True}}],
            "weight_version": self._version,
        }

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()


async def serve(engine: MemoryEngine, host: str, announce: Callable[[int], None]) -> None:
    """Serve control calls until one of them shuts down; `announce` gets the port."""
    done = asyncio.Event()
    # SGLang's scheduler takes one control call at a time.
    worker = ThreadPoolExecutor(max_workers=1)
    loop = asyncio.get_running_loop()

    async def status(request: web.Request) -> web.Response:
        return web.json_response(engine.status())

    async def control(request: web.Request) -> web.Response:
        name, payload = request.path.removeprefix("/"), await request.json()
        outcomes = await loop.run_in_executor(
            worker, partial(engine.call_everywhere, name, payload)
        )
        if engine.is_done:
            done.set()
        errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
        if errors:
            return web.json_response({"success": False, "message": "; ".join(errors)}, status=400)
        message = json.dumps([outcome["answer"] for outcome in outcomes])
        return web.json_response({"success": True, "message": message})

    app = web.Application(client_max_size=1 << 30)
    for path in ("/health", "/server_info", "/model_info"):
        app.router.add_get(path, status)
    app.router.add_post("/{control}", control)
    runner = web.AppRunner(app, shutdown_timeout=1.0, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    announce(runner.addresses[0][1])
    await done.wait()
    with contextlib.suppress(OSError):
        await runner.cleanup()
