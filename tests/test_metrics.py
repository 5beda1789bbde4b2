"""The record of a run goes on after a resume with every step once."""

import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_magistral.metrics import MetricsWriter


def rows(folder) -> list[tuple[str, int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(row["stage"], row["step"], row["loss"]) for row in map(json.loads, lines)]


def write(folder, stage: str, steps: range, loss: float, first_step: int = 0) -> None:
    writer = MetricsWriter(folder, stage, first_step)
    for step in steps:
        writer.write(step, {"loss": loss})
    writer.close()


def test_a_stage_that_goes_on_takes_back_what_was_recorded_beyond_and_nothing_else(tmp_path):
    write(tmp_path, "sft", range(4), 1.0)
    write(tmp_path, "rl", range(5), 2.0)
    write(tmp_path, "rl", range(3, 6), 3.0, first_step=3)
    assert rows(tmp_path) == [
        *(("sft", step, 1.0) for step in range(4)),
        *(("rl", step, 2.0) for step in range(3)),
        *(("rl", step, 3.0) for step in range(3, 6)),
    ]


def test_tensorboard_shows_every_step_once(tmp_path):
    write(tmp_path, "rl", range(5), 2.0)
    write(tmp_path, "rl", range(3, 6), 3.0, first_step=3)
    board = EventAccumulator(str(tmp_path / "tensorboard" / "rl"))
    board.Reload()
    shown = [(event.step, event.value) for event in board.Scalars("rl/loss")]
    assert shown == [(0, 2.0), (1, 2.0), (2, 2.0), (3, 3.0), (4, 3.0), (5, 3.0)]


def test_a_stage_that_begins_anew_leaves_no_row_of_before(tmp_path):
    write(tmp_path, "sft", range(2), 1.0)
    write(tmp_path, "rl", range(2), 2.0)
    write(tmp_path, "rl", range(1), 3.0)
    assert rows(tmp_path) == [("sft", 0, 1.0), ("sft", 1, 1.0), ("rl", 0, 3.0)]
