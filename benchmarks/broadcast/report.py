"""What was measured, in numbers: percentiles, bandwidths as nccl-tests counts them, ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.broadcast.engine import EngineReport
from benchmarks.broadcast.results import Options, Result, Round

MIB = 1 << 20
WHOLE_TARGET, PAUSE_TARGET, MEMORY_TARGET = 1.25, 1.1, 2.0


@dataclass(frozen=True)
class Spread:
    """Milliseconds: median, 95th percentile and maximum over rounds."""

    p50_ms: float
    p95_ms: float
    max_ms: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        ordered = sorted(1000 * s for s in seconds)
        p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
        return Spread(statistics.median(ordered), p95, ordered[-1])


@dataclass(frozen=True)
class Report:
    """One setting. Ratios are medians over rounds of the ratio within a round.

    `bus_gb_s` is nccl-tests' bus bandwidth: of a broadcast it equals the algorithm bandwidth.
    `cpu_per_bare` is that of processor time over all ranks but trainer ranks that only gather: the
    steadier number where other programs want the same cores, and `cpu_ms_per_mib` says what it is
    made of. `fastest_per_fastest` is that of the fastest update and the fastest bare broadcast,
    `copied_per_bare` what is due to one copy into and one out of a bucket, with no protocol at all.
    `extra_buckets` is memory beyond what was there, of the worst rank, in buckets.
    """

    setting: dict[str, Any]
    phases: dict[str, Spread]
    whole_per_bare: float | None
    fastest_per_fastest: float | None
    copied_per_bare: float | None
    cpu_per_bare: float | None
    cpu_ms_per_mib: dict[str, float]
    pause_per_transfer: float
    algorithm_gb_s: dict[str, float]
    bus_gb_s: dict[str, float]
    extra_buckets: dict[str, float]
    paused_share: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def missed(self) -> list[str]:
        """The targets that this setting does not reach."""
        worst = max(self.extra_buckets.values(), default=0.0)
        checks = [
            ("whole update / bare broadcast", self.whole_per_bare, WHOLE_TARGET),
            ("pause / transfer", self.pause_per_transfer, PAUSE_TARGET),
            ("extra memory in buckets", worst, MEMORY_TARGET),
        ]
        return [
            f"{what} {value:.2f} > {target:g}"
            for what, value, target in checks
            if value is not None and value > target
        ]


def summarise(options: Options, result: Result, step_s: float) -> Report:
    rounds = result.rounds
    num_bytes = rounds[0].timings.num_bytes
    timed = _phases(rounds)
    bare = [r.bare_s for r in rounds if r.bare_s is not None]
    copied = [r.copied_s for r in rounds if r.copied_s is not None]
    whole = [r.timings.total_s for r in rounds]
    seconds = {"bare broadcast": bare, "transfer": timed["transfer"], "whole update": whole}
    bandwidth = {
        name: num_bytes / statistics.median(values) / 1e9
        for name, values in seconds.items()
        if values
    }
    pause_s = statistics.median(r.timings.pause_s for r in rounds)
    return Report(
        setting=_setting(options, result, num_bytes),
        phases={name: Spread.of(values) for name, values in timed.items() if values},
        whole_per_bare=_median_ratio(whole, bare) if bare else None,
        fastest_per_fastest=min(whole) / min(bare) if bare else None,
        copied_per_bare=_median_ratio(copied, bare) if copied else None,
        cpu_per_bare=_cpu_ratio(rounds) if bare else None,
        cpu_ms_per_mib=_cpu_ms_per_mib(rounds, num_bytes) if bare else {},
        pause_per_transfer=_median_ratio([r.timings.pause_s for r in rounds], timed["transfer"]),
        algorithm_gb_s=bandwidth,
        bus_gb_s=bandwidth,
        extra_buckets=_memory(result),
        paused_share=pause_s / max(step_s, pause_s),
    )


def _phases(rounds: Sequence[Round]) -> dict[str, list[float]]:
    """Seconds by phase, one a round; of phases on generator ranks those of the slowest. Of a real
    engine only what the sender sees is known: `control calls` is all of the pause but transfer and
    checksum."""

    def slowest(field: Callable[[EngineReport], float]) -> list[float]:
        return [max(map(field, r.engines)) for r in rounds if r.engines]

    return {
        "gather": [r.gather.wire_s for r in rounds],
        "convert": [r.gather.convert_s for r in rounds],
        "first bucket": [r.timings.prepare_s for r in rounds],
        "pause, begin": slowest(lambda e: e.pause_s),
        "transfer": [r.timings.transfer_s for r in rounds],
        "receive": slowest(lambda e: e.receive_s),
        "load": slowest(lambda e: e.load_s),
        "checksum": [r.timings.checksum_s for r in rounds],
        "stamp, end, resume": slowest(lambda e: e.resume_s),
        "control calls": [
            r.timings.pause_s - r.timings.transfer_s - r.timings.checksum_s for r in rounds
        ],
        "paused": [r.timings.pause_s for r in rounds],
        "whole update": [r.timings.total_s for r in rounds],
        "bare broadcast": [r.bare_s for r in rounds if r.bare_s is not None],
        "with copies in and out": [r.copied_s for r in rounds if r.copied_s is not None],
    }


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _cpu_ratio(rounds: Sequence[Round]) -> float:
    whole = [r.cpu.update_s + sum(e.cpu_s for e in r.engines) for r in rounds]
    bare = [r.cpu.bare_s + sum(e.bare_cpu_s for e in r.engines) for r in rounds]
    return _median_ratio(whole, bare)


def _cpu_ms_per_mib(rounds: Sequence[Round], num_bytes: int) -> dict[str, float]:
    """Where the processor time of sender and generator ranks goes, medians over rounds."""

    def median(seconds: Callable[[Round], float]) -> float:
        return 1000 * statistics.median(map(seconds, rounds)) / (num_bytes / MIB)

    def engines(field: Callable[[EngineReport], float]) -> float:
        return median(lambda r: sum(map(field, r.engines)))

    received, loaded = engines(lambda e: e.receive_cpu_s), engines(lambda e: e.load_cpu_s)
    gathered = median(lambda r: r.cpu.gather_s)
    return {
        "bare, sender": median(lambda r: r.cpu.bare_s),
        "bare, generators": engines(lambda e: e.bare_cpu_s),
        "update, gather": gathered,
        "update, send and control": median(lambda r: r.cpu.update_s) - gathered,
        "update, receive": received,
        "update, load": loaded,
        "update, control of generators": engines(lambda e: e.cpu_s) - received - loaded,
    }


def _memory(result: Result) -> dict[str, float]:
    """The worst rank of each side, in buckets of the largest size that was sent."""
    sides = {
        "trainer": result.trainer_extra_bytes,
        "generator": result.generator_extra_bytes,
    }
    return {
        side: max(known) / result.max_bucket_bytes
        for side, values in sides.items()
        if (known := [value for value in values if value is not None])
    }


def _setting(options: Options, result: Result, num_bytes: int) -> dict[str, Any]:
    t, g = options.trainer, options.generator
    return {
        "backend": result.backend,
        "model_mib": num_bytes / MIB,
        "bucket_mib": options.bucket_bytes / MIB,
        "num_buckets": result.rounds[0].timings.num_buckets,
        "trainer": {"tp": t.tp, "pp": t.pp, "dp": t.dp},
        "generator": {"replicas": g.replicas, "tp": g.tp},
        "receiver": "SGLang" if options.engine_urls else "in memory: the wire and the protocol",
        "plan": options.plan.value,
        "rounds": options.rounds,
        "checksums": options.checksums,
    }


def show(report: Report, console: Console) -> None:
    setting = report.setting
    title = (
        f"{setting['model_mib']:.0f} MiB in {setting['num_buckets']} buckets over "
        f"{setting['backend']}, plan {setting['plan']}, trainer {_flat(setting['trainer'])}, "
        f"generators {_flat(setting['generator'])}; receivers: {setting['receiver']}"
    )
    table = Table("phase", title=title)
    for column in ("p50 ms", "p95 ms", "max ms", "algbw GB/s", "busbw GB/s"):
        table.add_column(column, justify="right")
    for name, spread in report.phases.items():
        rates = [report.algorithm_gb_s.get(name), report.bus_gb_s.get(name)]
        cells = [f"{value:.1f}" for value in (spread.p50_ms, spread.p95_ms, spread.max_ms)]
        table.add_row(name, *cells, *("" if rate is None else f"{rate:.2f}" for rate in rates))
    console.print(table)
    ratio = report.whole_per_bare
    if ratio is not None:
        console.print(f"whole update / bare broadcast  {ratio:.2f}  (<= {WHOLE_TARGET:g})")
        console.print(f"  of the fastest of each       {report.fastest_per_fastest:.2f}")
        console.print(f"  copies alone, no protocol    {report.copied_per_bare:.2f}")
        console.print(f"  of processor time            {report.cpu_per_bare:.2f}")
        for what, value in report.cpu_ms_per_mib.items():
            console.print(f"    {what:<29}  {value:.2f} ms/MiB", highlight=False)
    console.print(
        f"pause / transfer               {report.pause_per_transfer:.2f}  (<= {PAUSE_TARGET:g})"
    )
    for side, buckets in report.extra_buckets.items():
        console.print(f"extra memory, {side:<16} {buckets:.2f} buckets  (<= {MEMORY_TARGET:g})")
    console.print(f"generation paused              {report.paused_share:.2%} of a step")
    for miss in report.missed():
        console.print(f"missed: {miss}", style="yellow")


def _flat(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}{value}" for key, value in values.items())
