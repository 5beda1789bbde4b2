"""What the parts of an update cost by themselves: what the cost model is calibrated with.

Nothing here is an update: bytes are broadcast and copied with nothing around them, calls do
nothing, tensors that are loaded are next to empty. Each round of the benchmark measures all of it
beside one update, so that a machine that changes its speed changes both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.broadcast.memory import Scratch
from megatron_magistral.rollout.engine import EngineControl, Phase, TensorSpec
from megatron_magistral.weights.checksum import digest
from megatron_magistral.weights.engine_set import EngineSet
from megatron_magistral.weights.flatten import FlatBucket, unflatten

NUM_SMALL, SMALL_BYTES = 8, 64 << 10
NUM_NAMED, NAMED_SHAPE = 256, (8, 8)
DIGEST_BYTES = 4 << 20


@dataclass(frozen=True)
class GatherTime:
    """Seconds until the first bucket was there, and until the last one was."""

    first_s: float
    all_s: float


@dataclass(frozen=True)
class Parts:
    """Seconds, on rank 0; of copies for all the bytes of the model.

    gather            the buckets of an update, put together and thrown away
    small_broadcast_s of SMALL_BYTES to all generator ranks
    in_channels_s     the buckets of an update, sent as the plan `direct` sends runs; None under the
                      other plan
    copy_in_s         into two warm buffers in turn, as gathering does
    copy_out_s        of one generator rank's share to memory that no cache holds, as loading does
    call_s            a control call to all engines and back
    named_call_s      the same, naming NUM_NAMED tensors
    tensor_s          loading a tensor of next to no bytes
    digest_gb_s       GB/s of checksums
    """

    gather: GatherTime
    small_broadcast_s: float
    in_channels_s: float | None
    copy_in_s: float
    copy_out_s: float
    call_s: float
    named_call_s: float
    tensor_s: float
    digest_gb_s: float


def drain(buckets: Iterator[Any]) -> GatherTime:
    """Iterate to the end and keep none."""
    start = time.monotonic()
    next(buckets, None)
    first_s = time.monotonic() - start
    while next(buckets, None) is not None:
        pass
    return GatherTime(first_s, time.monotonic() - start)


class PartsMeter:
    """Rank 0's. `broadcast` sends buffers of these sizes to all generator ranks and returns the
    seconds, `in_channels` does so as the plan `direct` sends runs; `sizes` are those of the
    buckets; each of `tp` ranks of a generator loads a share."""

    def __init__(
        self,
        engines: EngineSet,
        broadcast: Callable[[Sequence[int]], float],
        sizes: Sequence[int],
        tp: int,
        device: torch.device,
        scratch: Scratch,
    ) -> None:
        self._engines = engines
        self._broadcast = broadcast
        self._sizes = list(sizes)
        self._tp = tp
        self._device = device
        self._scratch = scratch
        self.in_channels: Callable[[Sequence[int]], float] | None = None

    def measure(self, gather: GatherTime) -> Parts:
        """Calls are made one by one between the rest, as in an update: right after another, one
        finds all that it needs in the caches."""
        calls_s = [self._call({})]
        small_s = self._broadcast([SMALL_BYTES] * NUM_SMALL) / NUM_SMALL
        calls_s.append(self._call({}))
        copy_in_s, copy_out_s = self._copies()
        calls_s.append(self._call({}))
        sample = self._scratch.model(DIGEST_BYTES)
        digest_s = self._seconds(lambda: digest(sample))
        names = [f"model.layers.{n}.mlp.gate_proj.weight" for n in range(NUM_NAMED)]
        shapes = [[4096, 4096]] * NUM_NAMED
        named_call_s = self._call({"names": names, "shapes": shapes})
        return Parts(
            gather=gather,
            small_broadcast_s=small_s,
            in_channels_s=self.in_channels(self._sizes) if self.in_channels else None,
            copy_in_s=copy_in_s,
            copy_out_s=copy_out_s,
            call_s=statistics.mean(calls_s),
            named_call_s=named_call_s,
            tensor_s=self._load_small() / NUM_NAMED,
            digest_gb_s=DIGEST_BYTES / digest_s / 1e9,
        )

    def _call(self, payload: dict[str, Any]) -> float:
        """Seconds for a call to all engines that does nothing with `payload`."""
        call = partial(_report, payload=payload)
        start = time.monotonic()
        self._engines.run(Phase.INFO, call)
        return time.monotonic() - start

    def _copies(self) -> tuple[float, float]:
        """(in, out)."""
        model = self._scratch.model(sum(self._sizes)).split(self._sizes)
        buffers = self._scratch.buffers(self._sizes)

        def copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
            for target, source in pairs:
                target.copy_(source)

        shares = [size // self._tp for size in self._sizes]
        pairs = list(zip(buffers, model, shares, strict=True))
        return (
            self._seconds(lambda: copy([(buffer, part) for buffer, part, _ in pairs])),
            self._seconds(lambda: copy([(part[:n], buffer[:n]) for buffer, part, n in pairs])),
        )

    def _load_small(self) -> float:
        spec = TensorSpec("", NAMED_SHAPE, "bfloat16")
        num_bytes = NUM_NAMED * torch.Size(NAMED_SHAPE).numel() * torch.bfloat16.itemsize
        bucket = FlatBucket((spec,) * NUM_NAMED, self._scratch.model(num_bytes))
        place = torch.empty(NAMED_SHAPE, dtype=torch.bfloat16, device=self._device)

        def load() -> None:
            for _, tensor in unflatten(bucket):
                place.copy_(tensor.narrow(0, 0, len(place)))

        return self._seconds(load)

    def _seconds(self, work: Callable[[], object]) -> float:
        start = self._now()
        work()
        return self._now() - start

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()


async def _report(engine: EngineControl, *, payload: dict[str, Any]) -> None:
    await engine.post(Phase.INFO, "/report", payload, engine.timeouts.info_s)
