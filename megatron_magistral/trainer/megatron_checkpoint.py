"""The trainer's state as a Megatron distributed checkpoint, written while training goes on.

Megatron says which rank holds which part of which tensor, under names that know no layout, and
reads such a checkpoint into any other layout. Writing is ours. Megatron's own writer forks the
trainer, which has threads of gloo, CUDA and TensorBoard, and starts a second interpreter beside
each rank. Here a rank copies its part to host memory and a thread of it writes the copy, through
the storage writer of `torch.distributed.checkpoint`; the files are the same.

    write = SnapshotWrite(state, directory)      collective: copies, plans, starts the thread
    write.thread.join()                          any rank, any time: training goes on meanwhile
    write.finalise()                             collective, once every rank has written
    load(state, directory, same_layout=True)     collective
"""

# ruff: noqa: E402 (Megatron is imported after the CPU compatibility hook)

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from megatron_magistral.trainer import cpu

cpu.install()

from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    mcore_to_pyt_state_dict,
)

from megatron_magistral.trainer.checkpoint_files import FileDigest, digest
from megatron_magistral.trainer.ema import WeightAverage
from megatron_magistral.trainer.megatron import MegatronModel, MegatronOptimizer

# Optimizer state under the names and shapes of the parameters, so that it fits every layout;
# experts have an optimizer of their own, which needs no names of its own.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
_OPTIMIZER_PREFIX = "optimizer."


@dataclass(frozen=True)
class TrainerState:
    """What a checkpoint holds of one rank, and what loading fills in place."""

    model: MegatronModel
    optimizer: MegatronOptimizer
    average: WeightAverage | None

    @property
    def has_updates(self) -> bool:
        """Whether there was an optimizer step. Before the first one Adam has no moments."""
        return self.optimizer.scheduler.num_steps > 0


class SnapshotWrite:
    """One rank's share of a checkpoint, copied when this is made, written by `thread`."""

    def __init__(self, state: TrainerState, directory: Path) -> None:
        self._strategy = _ThreadedSave()
        self._request: AsyncRequest = dist_checkpointing.save(
            _sharded(state, is_loading=False) | {"rng": _sharded_rng(_rng_states())},
            str(directory),
            self._strategy,
            async_sharded_save=True,
            content_metadata=dict(_METADATA),
        )
        self._directory = directory
        self.failure: str | None = None
        """What went wrong in the thread."""
        self.digests: dict[str, FileDigest] = {}
        """Of the files that this rank has written, once the thread has ended."""
        self.elapsed_s = 0.0
        self.thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self.thread.start()

    def finalise(self) -> None:
        """Writes what describes the whole: a checkpoint without it is none."""
        for function in self._request.finalize_fns:
            function()

    def _write(self) -> None:
        begin = time.monotonic()
        try:
            names = self._request.async_fn()
            # Read back: the digests are of what the file system holds.
            self.digests = {name: digest(self._directory / name) for name in names}
        except Exception as error:  # the thread's edge: the training thread reports it
            self.failure = f"{type(error).__name__}: {error}"
        self.elapsed_s = time.monotonic() - begin


def load(state: TrainerState, directory: Path, *, same_layout: bool) -> None:
    """Fills model, optimizer, schedule, average and, in the same layout, the random states."""
    wanted = _sharded(state, is_loading=True)
    if same_layout:
        wanted["rng"] = _sharded_rng(None)
    found = dist_checkpointing.load(wanted, str(directory))
    for key, chunk in _named_chunks(state.model).items():
        chunk.module.load_state_dict(found[key])
    state.optimizer.inner.load_state_dict(found["optimizer"])
    scheduler = state.optimizer.scheduler
    scheduler.num_steps = 0
    scheduler.step(found["num_updates"])
    if state.average is not None:
        averages = state.average.state()
        torch._foreach_copy_(averages, [found["average"][str(i)] for i in range(len(averages))])
    if same_layout:
        _set_rng_states(found["rng"])


# --- what is saved ----------------------------------------------------------------------------


def _sharded(state: TrainerState, *, is_loading: bool) -> dict[str, Any]:
    """Every part of the state with its place in the whole, in the structure Megatron expects."""
    chunks = {
        key: chunk.module.sharded_state_dict(metadata=dict(_METADATA))
        for key, chunk in _named_chunks(state.model).items()
    }
    model = chunks if len(chunks) > 1 else chunks["model"]
    with _unpadded_places(state.model):
        optimizer = state.optimizer.inner.sharded_state_dict(
            model, is_loading=is_loading, metadata=dict(_METADATA)
        )
    sharded = {
        **chunks,
        "optimizer": optimizer,
        "num_updates": state.optimizer.scheduler.num_steps,
    }
    if state.average is not None:
        place_of = {id(place.data): place for place in nested_values(chunks)}
        parameters = [parameter for _, parameter in state.model.named_parameters()]
        pairs = zip(parameters, state.average.state(), strict=True)
        sharded["average"] = {
            str(i): make_sharded_optimizer_tensor(place_of[id(parameter)], average, "average")
            for i, (parameter, average) in enumerate(pairs)
        }
    return sharded


@contextmanager
def _unpadded_places(model: MegatronModel) -> Iterator[None]:
    """Corrects, for the time of a call, where Megatron looks for the parameters in their buffers.

    It gathers the optimizer's state without the padding between buckets, and then cuts it up by
    places that count the padding. With tied embeddings on a pipeline, which are a bucket of their
    own, the last stage would save the wrong numbers (0.16.1).
    """
    buffers = [
        buffer
        for chunk in model.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    padded = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        paddings = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
        before = list(accumulate(paddings, initial=0))
        buffer.param_index_map = {
            parameter: (begin - before[bucket], end - before[bucket], bucket)
            for parameter, (begin, end, bucket) in buffer.param_index_map.items()
        }
    try:
        yield
    finally:
        for buffer, places in zip(buffers, padded, strict=True):
            buffer.param_index_map = places


def _named_chunks(model: MegatronModel) -> dict[str, Any]:
    """Under the keys by which Megatron's optimizer looks for them."""
    if len(model.chunks) == 1:
        return {"model": model.chunks[0]}
    return {f"model{i}": chunk for i, chunk in enumerate(model.chunks)}


def _sharded_rng(states: dict[str, Any] | None) -> ShardedObject:
    """Each rank has its own; there is no other layout that they would fit."""
    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),))


def _rng_states() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": None if cpu.is_cpu() else torch.cuda.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_rng_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and not cpu.is_cpu():
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["megatron"])


# --- how it is written ------------------------------------------------------------------------


class _ThreadedSave(TorchDistSaveShardedStrategy):
    """Megatron's format `torch_dist`: plans with its planner, writes with torch's writer.

    From 0.17 on Megatron quietly replaces a strategy that is not of this class.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def async_save(
        self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = ""
    ) -> AsyncRequest:
        """Copies and plans. The request's function writes and returns the names of the files.
        `async_strategy` (from 0.17 on) says who writes, which is settled here."""
        planner = MCoreSavePlanner(flatten_state_dict=False)
        writer = FileSystemWriter(checkpoint_dir, sync_files=True)
        coordinates = dist.get_rank() == 0
        planner.set_up_planner(_host_copy(sharded_state_dict), is_coordinator=coordinates)
        writer.set_up_storage_writer(coordinates)
        plans: list[Any] = [None] * dist.get_world_size()
        plan = writer.prepare_local_plan(planner.create_local_plan())
        dist.all_gather_object(plans, plan)
        # Every rank makes the global plan of the same local plans, instead of one that sends it.
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
        plan = planner.finish_plan(plans[dist.get_rank()])
        results: list[WriteResult] = []

        def write() -> list[str]:
            results.extend(writer.write_data(plan, planner).wait())
            return sorted({result.storage_data.relative_path for result in results})

        return AsyncRequest(write, (), [_finisher(writer, metadata, results)])


def _finisher(
    writer: FileSystemWriter, metadata: Metadata, results: list[WriteResult]
) -> Callable[[], None]:
    def finish() -> None:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(results, everyone if dist.get_rank() == 0 else None)
        if dist.get_rank() == 0:
            writer.finish(metadata, everyone)

    return finish


def _host_copy(sharded_state_dict: Any) -> dict[str, Any]:
    """What this rank is to write, by name, in memory that training does not touch."""
    places: defaultdict[str, list[ShardedBase]] = defaultdict(list)
    for place in nested_values(sharded_state_dict):
        if not is_main_replica(place.replica_id):
            continue
        if isinstance(place, ShardedTensor):
            # The optimizer's state was gathered into host memory that is nobody else's.
            is_copy = place.key.startswith(_OPTIMIZER_PREFIX)
            place.data = place.data.detach().to("cpu", copy=not is_copy)
        places[place.key if isinstance(place, ShardedTensor) else place.unique_key].append(place)
    return mcore_to_pyt_state_dict(places)
