"""What a run came to, and what the model of the pipeline says that it should have come to."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.pipeline.rollout import LOADS_FILE
from benchmarks.pipeline.runs import SEED, Options
from megatron_magistral.analysis.lengths import parse_lengths
from megatron_magistral.analysis.outlook import HOUR_S, Outlook, outlook
from megatron_magistral.analysis.pipeline_model import Mode, Settings, Speeds, in_mode
from megatron_magistral.analysis.simulate import simulate
from megatron_magistral.analysis.speeds import SpeedCurve, sequence_rates
from megatron_magistral.rollout.audit import Violation, audit
from megatron_magistral.rollout.events import Finished
from megatron_magistral.rollout.journal import read_journal
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.types import FinishReason


@dataclass(frozen=True)
class Measured:
    """Of the steps after the warm-up; `idle` are shares of time, counts are of the whole run."""

    mode: Mode
    steps_per_h: float
    trained_tokens_per_s: float
    generator_idle: float
    generator_paused: float
    trainer_idle: float
    staleness_mean: float
    staleness_max: float
    num_aborted: int
    num_lost: int
    num_duplicated: int


@dataclass(frozen=True)
class TrainerSpeed:
    """Of the real trainer: tokens/s, and what a step takes beside that (new weights and their
    checks, the hand-over), and for how long of it generation was paused."""

    tokens_per_s: float
    beside_s: float
    pause_s: float


def rows_of(run: RunFolder) -> list[dict[str, Any]]:
    lines = run.metrics.read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["stage"] == "rl"]


def measure(run: RunFolder, mode: Mode, options: Options) -> Measured:
    rows = rows_of(run)
    first, counted = rows[options.num_warm_up - 1], rows[options.num_warm_up :]
    begin, end = first["time"], counted[-1]["time"]
    seconds = end - begin
    loads = json.loads((run.root / LOADS_FILE).read_text(encoding="utf-8"))
    events = list(read_journal(run.journal))
    steps = {int(row["step"]) for row in rows}
    report = audit(events, recorded_steps=steps, has_ended=True)
    kinds = Counter(finding.violation for finding in report.findings)
    broken = sum(
        isinstance(event, Finished) and event.finish_reason is not FinishReason.LENGTH
        for event in events
    )
    tokens = {row.step: 0 for row in report.rows}
    for row in report.rows:
        tokens[row.step] += row.num_tokens
    return Measured(
        mode=mode,
        steps_per_h=len(counted) / seconds * HOUR_S,
        trained_tokens_per_s=sum(tokens[int(row["step"])] for row in counted) / seconds,
        generator_idle=idle_share(loads, begin, end),
        generator_paused=sum(row["update_pause_s"] for row in counted) / seconds,
        trainer_idle=sum(row["trainer_wait_s"] for row in counted) / seconds,
        staleness_mean=fmean(row["staleness_mean"] for row in counted),
        staleness_max=max(row["staleness_max"] for row in rows),
        num_aborted=broken + int(rows[-1]["requests_retried_total"]),
        num_lost=kinds[Violation.LOST] + kinds[Violation.MISSING] + kinds[Violation.UNFIT],
        num_duplicated=kinds[Violation.TRAINED_TWICE],
    )


def idle_share(loads: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Share of [begin, end] in which no request is in flight."""
    idle_s = 0.0
    for (at, count), (until, _) in pairwise([*loads, (end, 0)]):
        if count == 0:
            idle_s += max(0.0, min(until, end) - max(at, begin))
    return idle_s / (end - begin)


def trainer_speed(run: RunFolder, num_warm_up: int) -> TrainerSpeed:
    rows = rows_of(run)[num_warm_up - 1 :]
    counted = rows[1:]
    trained_s = sum(row["train_s"] for row in counted)
    beside = [
        row["time"] - before["time"] - row["train_s"] - row["trainer_wait_s"]
        for before, row in pairwise(rows)
    ]
    return TrainerSpeed(
        tokens_per_s=sum(row["tokens"] for row in counted) / trained_s,
        beside_s=fmean(beside),
        pause_s=fmean(row["update_pause_s"] for row in counted),
    )


@dataclass(frozen=True)
class MeasuredSpeeds:
    """`curve` and `start_s` are the idle server's; `prompt_tokens` the mean length of a prompt."""

    curve: SpeedCurve
    start_s: float
    prompt_tokens: float
    trainer: TrainerSpeed


def predict(options: Options, mode: Mode, measured: MeasuredSpeeds) -> Outlook:
    """With the lengths that the run drew: a difference is the model's, not luck's."""
    settings = Settings(
        n_async=options.n_async,
        n_batch=options.n_batch,
        queue_capacity=options.queue_size,
        group_size=options.group_size,
    )
    settings = in_mode(settings, mode)
    trainer = measured.trainer
    speeds = Speeds(
        rates=sequence_rates(measured.curve, 1, settings.n_async, settings.n_async),
        start_s=measured.start_s,
        train_tokens_per_s=trainer.tokens_per_s,
        update_s=trainer.beside_s,
        pause_s=min(trainer.pause_s, trainer.beside_s),
        prompt_tokens=measured.prompt_tokens,
    )
    trace = simulate(
        settings, _same_draws(options), speeds, num_steps=options.steps_of(mode), seed=SEED
    )
    return outlook(trace, speeds, num_warm_up=options.num_warm_up)


def _same_draws(options: Options) -> Callable[[random.Random], float]:
    """The lengths in the order of the run's requests, of which the first is the evaluation's."""
    lengths, rng = parse_lengths(options.lengths, options.l_max), random.Random(SEED)

    def draw(_: random.Random) -> float:
        return float(max(1, round(lengths.sample(rng))))

    draw(rng)
    return draw
