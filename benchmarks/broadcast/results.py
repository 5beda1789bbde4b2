"""What is measured, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.broadcast.engine import EngineReport
from benchmarks.broadcast.parts import Parts
from megatron_magistral.weights.architecture import Architecture
from megatron_magistral.weights.gather import GatherSeconds
from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout
from megatron_magistral.weights.settings import PlanKind
from megatron_magistral.weights.transfer import UpdateTimings


@dataclass(frozen=True)
class Options:
    """What is measured: `rounds` updates and bare broadcasts, after two rounds that do not count.

    `checksums` is what users get: some of the tensors are read back and compared each time.
    """

    arch: Architecture
    trainer: TrainerLayout
    generator: GeneratorLayout
    bucket_bytes: int
    dtype: str = "bfloat16"
    rounds: int = 10
    timeout_s: float = 120.0
    checksums: bool = True
    engine_urls: tuple[str, ...] = ()
    """Real engines; without any, generator ranks are receivers in memory."""
    plan: PlanKind = PlanKind.GATHER

    @property
    def is_direct(self) -> bool:
        return self.plan is PlanKind.DIRECT

    @property
    def world_size(self) -> int:
        receivers = 0 if self.engine_urls else self.generator.world_size
        return self.trainer.world_size + receivers


@dataclass(frozen=True)
class SenderCpu:
    """Processor time: of an update and of gathering for it alone on all ranks that send, of a bare
    broadcast on rank 0, which alone sends one."""

    update_s: float
    gather_s: float
    bare_s: float


@dataclass(frozen=True)
class Round:
    """One update and, where generator ranks are ours, the bare broadcast beside it, without and
    with a copy on either side."""

    timings: UpdateTimings
    gather: GatherSeconds
    bare_s: float | None
    copied_s: float | None
    engines: tuple[EngineReport, ...]
    cpu: SenderCpu
    parts: Parts | None = None


@dataclass
class Result:
    """On rank 0. Memory is that of one update, beyond what was there, by rank.

    `max_bucket_bytes` is the size that was set, or that of a tensor which is larger.
    """

    backend: str
    max_bucket_bytes: int
    rounds: list[Round] = field(default_factory=list)
    trainer_extra_bytes: list[int | None] = field(default_factory=list)
    generator_extra_bytes: list[int | None] = field(default_factory=list)
