"""The cost model against what was measured.

Each case is one run. What its rounds say of bare operations (see parts.py) gives the model all that
it needs; the updates of those rounds are only compared with. Of everything the fastest round
counts: other programs only add time.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.broadcast.parts import NUM_NAMED, GatherTime, Parts
from benchmarks.broadcast.results import Options, Result, Round
from megatron_magistral.weights.checksum import HEAD_BYTES, ChecksumSettings
from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout
from megatron_magistral.weights.plan import Bucket, Plan, gather_plan
from megatron_magistral.weights.plan_cost import GB, BucketCost, Timeline, follow, packed_bytes
from megatron_magistral.weights.presets import num_parameters, sized

MIB = 1 << 20


@dataclass(frozen=True)
class Bare:
    """The fastest of each bare operation, `broadcast_s` that of the buckets of an update; and
    `overlap`, how far other work hides behind it."""

    parts: Parts
    broadcast_s: float
    overlap: float

    @staticmethod
    def of(options: Options, result: Result) -> Bare | None:
        """None where there was nothing bare: real engines take part in updates only."""
        parts = [r.parts for r in result.rounds if r.parts is not None]
        bare = [r.bare_s for r in result.rounds if r.bare_s is not None]
        if not parts or not bare:
            return None
        num_ranks = 1 + options.generator.world_size
        overlap = overlap_of(result.backend, num_ranks, len(os.sched_getaffinity(0)))
        return Bare(_fastest(parts), min(bare), overlap)


def _fastest(parts: Sequence[Parts]) -> Parts:
    return Parts(
        gather=GatherTime(
            first_s=min(p.gather.first_s for p in parts), all_s=min(p.gather.all_s for p in parts)
        ),
        small_broadcast_s=min(p.small_broadcast_s for p in parts),
        in_channels_s=min((s for p in parts if (s := p.in_channels_s) is not None), default=None),
        copy_in_s=min(p.copy_in_s for p in parts),
        copy_out_s=min(p.copy_out_s for p in parts),
        call_s=min(p.call_s for p in parts),
        named_call_s=min(p.named_call_s for p in parts),
        tensor_s=min(p.tensor_s for p in parts),
        digest_gb_s=max(p.digest_gb_s for p in parts),
    )


def predicted(options: Options, bare: Bare) -> Timeline:
    """An update, from bare operations of the same layout. Under the plan `direct` bytes go over
    channels, and instead of loading there are copies of what is not sent from where it is."""
    plan = _plan(options)
    num_bytes = sum(bucket.num_bytes for bucket in plan.buckets)
    rate, setup_s = _gathering(bare.parts.gather, plan.buckets[0].num_bytes, num_bytes)
    parts, count = bare.parts, len(plan.buckets)
    all_s = bare.broadcast_s if parts.in_channels_s is None else parts.in_channels_s
    wire_s = max(0.0, all_s - count * parts.small_broadcast_s)
    named_s = max(0.0, parts.named_call_s - parts.call_s) / NUM_NAMED
    costs = []
    for bucket in plan.buckets:
        share, tensors = bucket.num_bytes / num_bytes, len(bucket.pieces)
        checked = sampled_bytes(plan, bucket) if options.checksums else 0.0
        load_s = share * parts.copy_out_s + tensors * parts.tensor_s
        if options.is_direct:
            packed, unpacked = packed_bytes(plan, bucket)
            share_bytes = num_bytes / options.generator.tp  # what `copy_out_s` is for
            load_s = packed / num_bytes * parts.copy_in_s
            load_s += unpacked / share_bytes * parts.copy_out_s
        costs.append(
            BucketCost(
                gather_s=rate * bucket.num_bytes,
                convert_s=0.0,  # a part of gathering
                digest_s=checked / GB / parts.digest_gb_s,
                call_s=parts.call_s + tensors * named_s,
                wire_s=parts.small_broadcast_s + share * wire_s,
                load_s=load_s,
            )
        )
    return follow(costs, call_s=parts.call_s, setup_s=setup_s, overlap=bare.overlap)


def _gathering(gather: GatherTime, first_bytes: int, num_bytes: int) -> tuple[float, float]:
    """(seconds a byte, seconds before the first one)."""
    if num_bytes > first_bytes:
        rate = max(0.0, gather.all_s - gather.first_s) / (num_bytes - first_bytes)
        setup_s = gather.first_s - rate * first_bytes
        if setup_s > 0:
            return rate, setup_s
    return gather.all_s / num_bytes, 0.0


def overlap_of(backend: str, num_ranks: int, num_cores: int) -> float:
    """How far copies and calls hide behind a broadcast among so many ranks of one machine.

    A GPU has engines for both. Over gloo a broadcast keeps a core of each rank busy; what hides is
    what the others can do meanwhile.
    """
    if backend != "gloo":
        return 1.0
    return min(1.0, max(0.0, num_cores / num_ranks - 1))


def sampled_bytes(plan: Plan, bucket: Bucket) -> float:
    """How much of a bucket an update checks, on average: every tensor once in so many updates, and
    the head of the smallest matrix where the sample has none of it."""
    tensors = [plan.tensors[piece.tensor] for piece in bucket.pieces]
    itemsize = bucket.num_bytes / sum(tensor.num_elements for tensor in tensors)
    matrices = [tensor.num_elements for tensor in tensors if len(tensor.shape) > 1]
    smallest = min(matrices or [tensor.num_elements for tensor in tensors]) * itemsize
    share = 1 / ChecksumSettings().sample_stride
    return bucket.num_bytes * share + (1 - share) ** len(tensors) * min(smallest, HEAD_BYTES)


def _plan(options: Options) -> Plan:
    itemsize = 2 if options.dtype in ("bfloat16", "float16") else 4
    return gather_plan(
        options.arch,
        options.trainer,
        options.generator,
        bucket_bytes=options.bucket_bytes,
        itemsize=itemsize,
    )


def cases(options: Options) -> list[Options]:
    """Layouts on both sides, each with buckets of the size given and of a quarter of it; and the
    model at a quarter of its size."""
    layouts = [
        (TrainerLayout(), GeneratorLayout()),
        (TrainerLayout(tp=2), GeneratorLayout()),
        (TrainerLayout(pp=2), GeneratorLayout()),
        (TrainerLayout(), GeneratorLayout(tp=2)),
        (TrainerLayout(), GeneratorLayout(replicas=2)),
        (TrainerLayout(tp=2), GeneratorLayout(replicas=2)),
    ]
    found = [
        replace(options, trainer=trainer, generator=generator, bucket_bytes=bucket_bytes)
        for trainer, generator in layouts
        for bucket_bytes in (options.bucket_bytes, options.bucket_bytes // 4)
    ]
    quarter = sized(num_parameters(options.arch) * 2 / MIB / 4)
    trainer, generator = layouts[0]
    return [*found, replace(options, arch=quarter, trainer=trainer, generator=generator)]


@dataclass(frozen=True)
class Comparison:
    """A case: seconds of the fastest update, and what was predicted of it."""

    model_mib: float
    bucket_mib: float
    trainer: TrainerLayout
    generator: GeneratorLayout
    bare_broadcast_s: float
    predicted_s: float
    measured_s: float
    overlap: float
    predicted_parts_s: dict[str, float]
    measured_parts_s: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.ratio - 1


def compare(options: Options, result: Result) -> Comparison | None:
    """None where there was nothing bare."""
    bare = Bare.of(options, result)
    if bare is None:
        return None
    guess = predicted(options, bare)
    fastest = min(result.rounds, key=lambda r: r.timings.total_s)
    return Comparison(
        model_mib=fastest.timings.num_bytes / MIB,
        bucket_mib=options.bucket_bytes / MIB,
        trainer=options.trainer,
        generator=options.generator,
        bare_broadcast_s=bare.broadcast_s,
        predicted_s=guess.total_s,
        measured_s=fastest.timings.total_s,
        overlap=bare.overlap,
        predicted_parts_s={
            "first bucket": guess.first_bucket_s,
            "transfer": guess.transfer_s,
            "checksum": guess.checksum_s,
            "control calls": guess.pausing_s + guess.resume_s,
        },
        measured_parts_s=_measured_parts(fastest),
    )


def _measured_parts(measured: Round) -> dict[str, float]:
    t = measured.timings
    return {
        "first bucket": t.prepare_s,
        "transfer": t.transfer_s,
        "checksum": t.checksum_s,
        "control calls": t.pause_s - t.transfer_s - t.checksum_s,
    }


def spread(errors: Sequence[float]) -> tuple[float, float]:
    """Median and largest absolute error."""
    absolute = [abs(error) for error in errors]
    return statistics.median(absolute), max(absolute)
