"""The pure parts of the pipeline benchmark: its configs, its shares of time, its accounts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.pipeline.calibrate import Calibration, mean_of
from benchmarks.pipeline.results import (
    MeasuredSpeeds,
    TrainerSpeed,
    idle_share,
    measure,
    predict,
    trainer_speed,
)
from benchmarks.pipeline.rollout import LOADS_FILE
from benchmarks.pipeline.runs import Options, config_of
from megatron_magistral.analysis.pipeline_model import Mode
from megatron_magistral.analysis.speeds import SpeedCurve
from megatron_magistral.rollout.events import Admitted, Closed, Finished, Outcome, Taken, Trained
from megatron_magistral.rollout.journal import Journal
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.types import FinishReason, Span

OPTIONS = Options(
    n_batch=4,
    n_async=8,
    queue_size=8,
    group_size=2,
    l_max=256,
    lengths="pareto:40,1.2",
    num_steps=4,
    num_async_steps=8,
    num_warm_up=1,
    timeout_s=60.0,
)


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_is_a_valid_config_of_the_same_batches(mode, tmp_path):
    rl = config_of(OPTIONS, mode, tmp_path).rl
    assert rl is not None
    assert (rl.n_batch, rl.group_size) == (4, 2)
    assert rl.num_steps == (8 if mode is Mode.ASYNCHRONOUS else 4)
    # Without asynchrony there is no room for a group beyond one batch.
    room = rl.n_async + rl.queue_capacity - rl.n_batch
    assert (room >= rl.group_size) == (mode is Mode.ASYNCHRONOUS)
    assert (rl.max_staleness == 0) == (mode is Mode.SYNCHRONOUS)


def test_idle_is_the_time_without_a_request():
    loads = [(0.0, 0), (10.0, 1), (14.0, 0), (15.0, 2), (16.0, 1), (18.0, 0)]
    assert idle_share(loads, 10.0, 20.0) == pytest.approx((1 + 2) / 10)
    assert idle_share(loads, 8.0, 12.0) == pytest.approx(2 / 4)
    assert idle_share([(0.0, 0)], 5.0, 6.0) == 1.0


def test_calibrations_are_combined_by_their_mean():
    runs = [Calibration(((1, s), (2, 2 * s)), s / 100) for s in (10.0, 30.0)]
    curve, start_s = mean_of(runs)
    assert curve == SpeedCurve(((1, 20.0), (2, 40.0)))
    assert start_s == 0.2


def write_run(root, *, finish=FinishReason.LENGTH, skip=None, twice=False) -> RunFolder:
    """Four steps of two groups of two completions of ten tokens, five seconds apart."""
    root.mkdir(exist_ok=True)
    run = RunFolder(root)
    with Journal(run.journal) as journal:
        for ordinal in range(8):
            if ordinal == skip:
                continue
            journal.append(Admitted(ordinal, "p", 2, ordinal // 2, None, (1, 2)))
            for member in range(2):
                journal.append(Finished(ordinal, member, (Span(0, 0, 10),), finish, ""))
            journal.append(Closed(ordinal, Outcome.TAKEN, "", 20, (0, 0)))
        for step in range(4):
            batch = (2 * step, 2 * step + 1)
            journal.append(Taken(step, (0, 1) if twice and step == 3 else batch))
            journal.append(Trained(step))
    row = {
        "stage": "rl",
        "tokens": 48.0,
        "train_s": 1.0,
        "trainer_wait_s": 3.0,
        "update_pause_s": 0.25,
        "staleness_mean": 0.5,
        "staleness_max": 1.0,
        "requests_retried_total": 0.0,
    }
    rows = [row | {"step": step, "time": 100.0 + 5 * step} for step in range(4)]
    run.metrics.write_text("".join(json.dumps(r) + "\n" for r in rows))
    (root / LOADS_FILE).write_text(json.dumps([(90.0, 4), (112.0, 0), (115.0, 0)]))
    return run


def test_a_run_is_measured_after_its_warm_up(tmp_path):
    run = write_run(tmp_path)
    measured = measure(run, Mode.ASYNCHRONOUS, OPTIONS)
    assert measured.steps_per_h == pytest.approx(3600 / 5)
    assert measured.trained_tokens_per_s == pytest.approx(40 / 5)
    assert measured.trainer_idle == pytest.approx(3 / 5)
    assert measured.generator_idle == pytest.approx(3 / 15)
    assert measured.generator_paused == pytest.approx(0.25 / 5)
    assert (measured.num_aborted, measured.num_lost, measured.num_duplicated) == (0, 0, 0)
    assert trainer_speed(run, 1) == TrainerSpeed(tokens_per_s=48.0, beside_s=1.0, pause_s=0.25)


def test_what_went_wrong_is_counted(tmp_path):
    aborted = write_run(tmp_path / "a", finish=FinishReason.ABORT)
    assert measure(aborted, Mode.ASYNCHRONOUS, OPTIONS).num_aborted == 16
    lost = write_run(tmp_path / "b", skip=5)
    assert measure(lost, Mode.ASYNCHRONOUS, OPTIONS).num_lost > 0
    duplicated = write_run(tmp_path / "c", twice=True)
    assert measure(duplicated, Mode.ASYNCHRONOUS, OPTIONS).num_duplicated == 2


def test_predictions_are_of_the_lengths_that_were_drawn():
    options = replace(OPTIONS, num_steps=8)
    curve, trainer = SpeedCurve(((1, 50.0), (8, 200.0))), TrainerSpeed(1000.0, 0.1, 0.05)
    speeds = MeasuredSpeeds(curve, 0.01, 12.0, trainer)
    first, again = (predict(options, Mode.SYNCHRONOUS, speeds) for _ in range(2))
    assert first == again
    gain = predict(options, Mode.ASYNCHRONOUS, speeds).steps_per_h / first.steps_per_h
    assert gain > 1.0
