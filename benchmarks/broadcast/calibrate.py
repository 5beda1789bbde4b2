"""The cost model against what was measured.

Speeds come from the bare operations of one run, and how far copies and wire hide each other from
its update: where ranks share cores, that is a property of the machine. All else is predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.broadcast.results import Options, Result
from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout
from megatron_magistral.weights.plan import gather_plan
from megatron_magistral.weights.plan_cost import Links, Prediction, predict
from megatron_magistral.weights.presets import num_parameters, sized

MIB = 1 << 20
NUM_OVERLAPS = 20


def links_of(result: Result) -> Links:
    """Speeds that the bare operations of a run showed; none is taken from an update."""
    bare = result.bare
    assert bare is not None, "real engines take part in nothing bare"
    (small, small_s), (large, large_s) = bare.broadcasts
    gb_s = (large - small) / max(large_s - small_s, 1e-9) / 1e9
    return Links(
        gpus_per_node=1 << 20,  # all ranks are on one machine
        nvlink_gb_s=gb_s,
        hbm_copy_gb_s=bare.copy_gb_s,
        collective_s=max(0.0, small_s - small / gb_s / 1e9),
        hop_s=0.0,
        http_call_s=bare.call_s,
        http_each_s=0.0,
        http_tensor_s=0.0,
        tensor_s=bare.tensor_s,
        overlap=1.0 if result.backend == "nccl" else 0.0,
    )


def calibrated(options: Options, result: Result) -> Links:
    """The speeds that explain the update of this run best."""
    links = links_of(result)
    overlaps = [number / NUM_OVERLAPS for number in range(NUM_OVERLAPS + 1)]

    def error(overlap: float) -> float:
        return abs(relative_error(predicted(options, replace(links, overlap=overlap)), result))

    return replace(links, overlap=min(overlaps, key=error))


def variants(options: Options) -> list[tuple[str, Options]]:
    """Settings that differ from `options` in one thing each, with what that is."""
    size_mib = num_parameters(options.arch) * 2 / MIB
    replicas = options.generator.replicas
    return [
        ("a quarter of the model", replace(options, arch=sized(size_mib / 4))),
        ("twice the model", replace(options, arch=sized(size_mib * 2))),
        ("a quarter of the bucket", replace(options, bucket_bytes=options.bucket_bytes // 4)),
        ("twice the bucket", replace(options, bucket_bytes=options.bucket_bytes * 2)),
        ("trainer TP 2", replace(options, trainer=TrainerLayout(tp=2))),
        ("trainer PP 2", replace(options, trainer=TrainerLayout(pp=2))),
        ("generator TP 2", replace(options, generator=GeneratorLayout(replicas=replicas, tp=2))),
    ]


def predicted(options: Options, links: Links) -> Prediction:
    itemsize = 2 if options.dtype in ("bfloat16", "float16") else 4
    plan = gather_plan(
        options.arch,
        options.trainer,
        options.generator,
        bucket_bytes=options.bucket_bytes,
        itemsize=itemsize,
    )
    return predict(plan, options.trainer, options.generator, links)


def relative_error(prediction: Prediction, result: Result) -> float:
    """Of the median whole update, less what the model leaves out on purpose: checksums."""
    measured = statistics.median(r.timings.total_s - r.timings.checksum_s for r in result.rounds)
    return prediction.total_s / measured - 1


def spread(errors: Sequence[float]) -> tuple[float, float]:
    """Median and largest absolute error."""
    absolute = [abs(error) for error in errors]
    return statistics.median(absolute), max(absolute)
