"""What each rank of the benchmark does: trainer ranks first, then the generators' ranks.

Rank 0 and the leaders of other pipeline stages send with the real `WeightSender`; the other trainer
ranks gather with them; generator ranks are receivers in memory, or real engines that were started
elsewhere. Rounds of a bare broadcast and of an update alternate, so that a machine that changes its
speed changes both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.broadcast.engine import EngineReport, MemoryEngine, serve
from benchmarks.broadcast.groups import (
    exchange_urls,
    join,
    local_host,
    make_channels,
    make_engine_groups,
    make_mesh,
    own_device,
    own_group,
    wire_backend,
)
from benchmarks.broadcast.memory import PeakMemory, Scratch
from benchmarks.broadcast.parts import GatherTime, PartsMeter, drain
from benchmarks.broadcast.results import Options, Result, Round, SenderCpu
from benchmarks.broadcast.wires import BareWires
from megatron_magistral.rollout.engine import ControlTimeouts, EngineControl, Phase
from megatron_magistral.weights.buffers import Staging
from megatron_magistral.weights.checksum import ChecksumSettings
from megatron_magistral.weights.delivery import EngineAddress
from megatron_magistral.weights.engine_set import EngineSet
from megatron_magistral.weights.gather import GatherSeconds, Mesh, Reach, gather_hf
from megatron_magistral.weights.lane import OwnLane
from megatron_magistral.weights.leader import Leader, link_leaders, peer_lanes
from megatron_magistral.weights.manifest import manifest_of
from megatron_magistral.weights.names import Param, hf_shapes, parameters, shard_shape
from megatron_magistral.weights.placement import tensors
from megatron_magistral.weights.plan import gather_plan
from megatron_magistral.weights.transfer import UpdateTimings, WeightSender

WARM_UP_ROUNDS = 2
# Beyond the number of any tensor: with NO_CHECKSUMS, updates from here on check none.
FIRST_VERSION = 1 << 20
NO_CHECKSUMS = ChecksumSettings(sample_stride=1 << 30, full_every=1 << 30)


def run_rank(options: Options) -> Result | None:
    """This process's part; the result on rank 0. Raises what failed, after leaving the groups."""
    torch.set_num_threads(1)  # ranks share cores where there is no GPU
    rank = join(options)
    try:
        is_trainer = rank < options.trainer.world_size
        mesh = make_mesh(options)
        trainer_ranks = own_group([range(options.trainer.world_size)], "gloo")
        peers, bare_groups = make_engine_groups(options)
        wires = BareWires(bare_groups, make_channels(options))
        device = own_device()
        if not is_trainer:
            assert peers is not None
            _run_engine(options, rank - options.trainer.world_size, peers, wires, device)
            return None
        assert mesh is not None
        urls = exchange_urls(None) if not options.engine_urls else options.engine_urls
        return _Trainer(options, mesh, trainer_ranks, urls, wires, device).run()
    finally:
        dist.destroy_process_group()


def _run_engine(
    options: Options,
    rank: int,
    peers: dist.ProcessGroup,
    wires: BareWires,
    device: torch.device,
) -> None:
    dtype = getattr(torch, options.dtype)
    engine = MemoryEngine(options.arch, options.generator, rank, peers, wires, dtype, device)
    if rank % options.generator.tp:
        exchange_urls(None)
        engine.follow()
        return
    host = local_host()
    asyncio.run(serve(engine, host, lambda port: _announce(f"http://{host}:{port}")))


def _announce(url: str) -> None:
    exchange_urls(url)


class _Trainer:
    """A trainer rank. The first one decides what happens; the others follow it."""

    def __init__(
        self,
        options: Options,
        mesh: Mesh,
        ranks: dist.ProcessGroup,
        urls: Sequence[str],
        wires: BareWires,
        device: torch.device,
    ) -> None:
        self._options = options
        self._mesh = mesh
        self._ranks = ranks
        self._urls = urls
        self._wires = wires
        self._device = device
        self._dtype = getattr(torch, options.dtype)
        self._params = parameters(options.arch)
        self._local = self._make_shards()
        plan = gather_plan(
            options.arch,
            options.trainer,
            options.generator,
            bucket_bytes=options.bucket_bytes,
            itemsize=self._dtype.itemsize,
        )
        self._sizes = [bucket.num_bytes for bucket in plan.buckets]
        bound_s = options.timeout_s
        self._timeouts = ControlTimeouts(transfer_s=bound_s, checksum_s=bound_s)
        self._links = link_leaders(mesh, local_host(), bound_s) if mesh.is_leader else []
        self._memory = PeakMemory(device)
        self._scratch = Scratch(device)
        self._staging = Staging()
        self._version = FIRST_VERSION
        self._bare_cpu_s = 0.0

    def run(self) -> Result | None:
        if dist.get_rank():
            self._follow()
            return None
        result = Result(wire_backend(), max(self._options.bucket_bytes, *self._sizes))
        engines = EngineSet([EngineControl(url) for url in self._urls])
        try:
            with self._make_sender() as sender:
                tp = self._options.generator.tp
                sender.connect([EngineAddress(url, tp) for url in self._urls])
                sender.release()
                self._warm_up(sender, engines, result)
                for _ in range(self._options.rounds):
                    result.rounds.append(self._round(sender, engines))
        finally:
            if not self._options.engine_urls:
                engines.run(Phase.LEAVE, partial(_post, path="/shut_down", payload={}))
            engines.close()
        return result

    def _make_sender(self) -> WeightSender:
        return WeightSender(
            manifest_of(hf_shapes(self._options.arch), self._dtype),
            backend=wire_backend(),
            host=local_host(),
            dtype=self._dtype,
            timeouts=self._timeouts,
            checksums=None if self._options.checksums else NO_CHECKSUMS,
            peers=peer_lanes(self._mesh, self._links, self._timeouts),
            plan=self._options.plan,
            packing=self._staging.packing,
        )

    def _warm_up(self, sender: WeightSender, engines: EngineSet, result: Result) -> None:
        """The first update checks all that arrived; trainer ranks measure the memory of the second
        one, anew. Engines keep theirs from the first one on."""
        first = self._round(sender, engines)
        self._round(sender, engines, measures_memory=True)
        result.trainer_extra_bytes = self._gathered(self._memory.extra_bytes())
        result.generator_extra_bytes = [report.extra_bytes for report in first.engines]

    def _round(
        self, sender: WeightSender, engines: EngineSet, measures_memory: bool = False
    ) -> Round:
        seconds = GatherSeconds()
        gathers: list[GatherTime] = []
        gather_cpu_s = self._cpu_of_senders(lambda: gathers.append(drain(self._buckets(seconds))))
        bare_s, copied_s, bare_cpu_s, parts = None, None, 0.0, None
        if not self._options.engine_urls:
            parts = self._meter(engines).measure(gathers[0])
            copied_s = self._bare_broadcast(engines, self._sizes, copies=True)
            bare_s = self._bare_broadcast(engines, self._sizes)
            bare_cpu_s = self._bare_cpu_s
        if measures_memory:
            self._start_memory()
        self._version += 1
        timings: list[UpdateTimings] = []
        cpu_s = self._cpu_of_senders(lambda: timings.append(self._update(sender)))
        reports = () if self._options.engine_urls else _reports(self._urls)
        cpu = SenderCpu(update_s=cpu_s, gather_s=gather_cpu_s, bare_s=bare_cpu_s)
        return Round(timings[0], seconds, bare_s, copied_s, reports, cpu, parts)

    def _update(self, sender: WeightSender) -> UpdateTimings:
        timings = sender.send(self._buckets(None), self._version)
        sender.release()
        return timings

    def _follow(self) -> None:
        """What the first rank does in `run`, on another one: this sends its stage's part if it
        leads one."""
        leader: Leader | None = None
        if self._links:
            (link,) = self._links
            packing = self._staging.packing
            lane = OwnLane(local_host(), wire_backend(), self._timeouts, packing)
            leader = Leader(lane, link, self._dtype, patience_s=self._options.timeout_s)
            leader.serve(())
        take_part = drain if leader is None else leader.serve
        for number in range(WARM_UP_ROUNDS + self._options.rounds):
            self._cpu_of_senders(lambda: drain(self._buckets(GatherSeconds())))
            measures_memory = number == WARM_UP_ROUNDS - 1
            if measures_memory:
                self._start_memory()
            self._cpu_of_senders(lambda: take_part(self._buckets(None)))
            if measures_memory:
                self._gathered(self._memory.extra_bytes())
        if leader is not None:
            leader.close()

    def _start_memory(self) -> None:
        """What an update takes counts from here on, with what it keeps for the next."""
        self._staging.drop()
        self._memory.start()

    def _cpu_of_senders(self, work: Callable[[], object]) -> float:
        """Processor time that this takes on all ranks that send. Collective over trainer ranks."""
        start_s = time.process_time()
        work()
        spent_s = time.process_time() - start_s
        return sum(self._gathered(spent_s if self._mesh.is_leader else 0.0))

    def _buckets(self, seconds: GatherSeconds | None) -> Any:
        bucket_bytes = self._options.bucket_bytes
        shards, mesh, dtype = self._local, self._mesh, self._dtype
        return gather_hf(
            shards,
            self._params,
            mesh,
            bucket_bytes,
            dtype,
            seconds,
            reach=Reach.LEADERS,
            lends=self._options.is_direct,
            staging=self._staging,
        )

    def _bare_broadcast(
        self,
        engines: EngineSet,
        sizes: Sequence[int],
        *,
        copies: bool = False,
        channels: bool = False,
    ) -> float:
        """Seconds for buffers of these sizes, one after the other, with nothing around them; or
        with the `copies` that no update can do without, of each next one in and of each one out;
        or over the `channels` of the plan `direct`."""
        num_parts = len(self._wires.groups)
        payload = {
            "sizes": list(sizes),
            "copies": copies,
            "channels": channels,
            "num_parts": num_parts,
        }
        running = engines.start(
            Phase.TRANSFER, partial(_post, path="/bare_broadcast", payload=payload)
        )
        buffers = self._scratch.buffers(sizes)
        parts = [size if copies else 0 for size in sizes]
        sources = self._scratch.model(sum(parts)).split(parts)
        for group in self._wires.groups:
            dist.barrier(group)
        start, cpu_s = self._now(), time.process_time()
        for number, buffer in enumerate(buffers):
            if number == 0:
                buffer[: parts[0]].copy_(sources[0])
            works = self._wires.send(buffer, self._options.timeout_s, channels=channels)
            for following in range(number + 1, min(number + 2, len(buffers))):
                buffers[following][: parts[following]].copy_(sources[following])
            for work in works:
                work.wait()
        bare_s = self._now() - start
        self._bare_cpu_s = time.process_time() - cpu_s
        if errors := running.wait():
            raise RuntimeError(f"bare broadcast: {errors[0]}")
        return bare_s

    def _meter(self, engines: EngineSet) -> PartsMeter:
        broadcast = partial(self._bare_broadcast, engines)
        tp = self._options.generator.tp
        meter = PartsMeter(engines, broadcast, self._sizes, tp, self._device, self._scratch)
        if self._options.is_direct:
            meter.in_channels = partial(broadcast, channels=True)
        return meter

    def _gathered(self, value: Any) -> list[Any]:
        """The values of all trainer ranks, on each of them."""
        values: list[Any] = [None] * self._options.trainer.world_size
        dist.all_gather_object(values, value, group=self._ranks)
        return values

    def _make_shards(self) -> dict[str, Tensor]:
        stage_of = {t.name: t.stage for t in tensors(self._options.arch, self._options.trainer)}
        held: dict[str, Param] = {
            name: param
            for name, param in self._params.items()
            if not param.is_copy and stage_of[param.sources[0]] == self._mesh.pp_rank
        }
        generator = torch.Generator(self._device).manual_seed(dist.get_rank())
        return {
            name: torch.randn(
                shard_shape(param, self._mesh.tp_size), generator=generator, device=self._device
            ).to(self._dtype)
            for name, param in held.items()
        }

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()


async def _post(engine: EngineControl, *, path: str, payload: dict[str, Any]) -> None:
    await engine.post(Phase.TRANSFER, path, payload, engine.timeouts.transfer_s)


def _reports(urls: Sequence[str]) -> tuple[EngineReport, ...]:
    """What every engine rank measured of the last update."""

    async def ask() -> list[EngineReport]:
        found: list[EngineReport] = []
        for url in urls:
            async with EngineControl(url) as engine:
                reply = await engine.post(Phase.INFO, "/report", {}, engine.timeouts.info_s)
            found += msgspec.json.decode(reply["message"], type=list[EngineReport])
        return found

    return tuple(asyncio.run(ask()))
