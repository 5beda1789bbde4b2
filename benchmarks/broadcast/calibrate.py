"""The cost model against what was measured: links from bare operations of the run, then updates."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.broadcast.results import Options, Result
from megatron_magistral.weights.plan import gather_plan
from megatron_magistral.weights.plan_cost import Links, Prediction, predict


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
