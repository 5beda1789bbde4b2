"""An audit finds nothing in a history that can be, and names what cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_magistral.cli import app
from megatron_magistral.rollout.audit import Fate, Violation, audit
from megatron_magistral.rollout.events import (
    Admitted,
    AnyEvent,
    Began,
    Closed,
    How,
    Outcome,
    Taken,
    Trained,
)
from megatron_magistral.rollout.journal import Journal
from megatron_magistral.run_folder import RunFolder, Stage
from tests.rollout.histories import History


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 500))
def test_each_group_of_a_possible_history_has_one_fate_and_nothing_is_found(seed, count):
    events = list(History(seed).events(count))
    report = audit(events)
    assert report.findings == ()
    assert [row.ordinal for row in report.rows] == list(range(len(report.rows)))
    steps = {e.step for e in events if isinstance(e, Trained)}
    taken = {o: e.step for e in events if isinstance(e, Taken) for o in e.ordinals}
    for row in report.rows:
        is_trained = taken.get(row.ordinal) in steps
        assert (row.fate is Fate.TRAINED) == is_trained
        assert row.step == (taken[row.ordinal] if is_trained else None)


def group(ordinal: int, outcome: Outcome = Outcome.TAKEN, due: int | None = None) -> list[AnyEvent]:
    return [
        Admitted(ordinal, f"p{ordinal}", 2, 0, due, ()),
        Closed(ordinal, outcome, "", 5, (0, 0)),
    ]


def closed(ordinal: int, oldest: int, newest: int) -> Closed:
    return Closed(ordinal, Outcome.TAKEN, "", 5, (oldest, newest))


def step(number: int, *ordinals: int) -> list[AnyEvent]:
    return [Taken(number, ordinals), Trained(number)]


BEGAN: list[AnyEvent] = [Began(0)]
BROKEN = {
    Violation.TRAINED_TWICE: (
        [*BEGAN, *group(0), *group(1), *step(0, 0), *step(1, 1, 0)],
        "group 0 in steps 0, 1",
    ),
    Violation.LOST: ([*BEGAN, *group(0), *group(2)], "group 1 was never admitted"),
    Violation.UNFIT: (
        [*BEGAN, *group(0, Outcome.DROPPED), *step(0, 0)],
        "group 0 was dropped, and trained in step 0",
    ),
    Violation.TOO_OLD: (
        [*BEGAN, *group(0), *group(1, due=0), *step(0, 0), *step(1, 1)],
        "group 1 was due in step 0, and trained in step 1",
    ),
    Violation.TOO_NEW: (
        [*BEGAN, Admitted(0, "p0", 2, 0, None, ()), closed(0, 0, 1), *step(0, 0)],
        "group 0 has tokens of version 1, and was trained in step 0",
    ),
}


@pytest.mark.parametrize("violation", BROKEN)
def test_what_cannot_be_is_named(violation):
    events, detail = BROKEN[violation]
    (finding,) = audit(events).findings
    assert (finding.violation, finding.detail) == (violation, detail)


def test_tokens_from_before_the_admission_are_named():
    trained = [*BEGAN, *group(0), Admitted(1, "p1", 2, 1, 3, ()), closed(1, 0, 1)]
    (finding,) = audit([*trained, *step(0, 0), *step(1, 1)]).findings
    assert finding.violation is Violation.TOO_OLD
    assert finding.detail == "group 1 has tokens of version 0, and was admitted under version 1"


def test_a_step_of_the_metrics_that_has_no_batch_is_missing():
    (finding,) = audit([*BEGAN, *group(0), *step(0, 0)], recorded_steps={0, 1}).findings
    assert finding.violation is Violation.MISSING
    assert "step 1" in finding.detail


def test_a_batch_that_was_taken_is_open_while_the_run_lasts_and_lost_after_its_end():
    events = [*BEGAN, *group(0), Taken(0, (0,))]
    assert audit(events).rows[0].fate is Fate.OPEN
    (finding,) = audit(events, has_ended=True).findings
    assert finding.violation is Violation.LOST


def test_steps_after_the_one_that_trainers_went_back_to_count_once():
    trained = [*BEGAN, *group(0), *group(1), *step(0, 0), *step(1, 1)]
    assert audit([*trained, Began(1)]).count(Fate.TRAINED) == 1
    report = audit([*trained, Began(1), *step(1, 1)], has_ended=True)
    assert (report.findings, report.count(Fate.TRAINED), report.num_begun) == ((), 2, 2)


def test_groups_that_were_sampled_anew_are_trained_in_the_history_that_remained():
    trained = [*BEGAN, *group(0), *group(1), *step(0, 0), *step(1, 1)]
    again = [Closed(1, Outcome.TAKEN, "", 7, (1, 1)), *step(1, 1)]
    report = audit([*trained, Began(1, How.ANEW), *again], has_ended=True)
    assert report.findings == ()
    assert [row.num_tokens for row in report.rows] == [5, 7]


def test_a_group_that_was_sampled_anew_is_due_as_if_it_were_admitted_then():
    trained = [*BEGAN, *group(0), *group(1, due=2), *step(0, 0), *step(1, 1)]
    again = [
        Began(1, How.ANEW),
        Closed(1, Outcome.TAKEN, "", 7, (1, 1)),
        Admitted(2, "p2", 2, 1, 3, ()),
    ]
    closed = Closed(2, Outcome.TAKEN, "", 7, (1, 1))
    in_time = [*trained, *again, closed, *step(1, 2), Taken(2, ()), Trained(2), *step(3, 1)]
    assert audit(in_time).findings == ()
    late = [*in_time[:-2], Taken(3, ()), Trained(3), *step(4, 1)]
    (finding,) = audit(late).findings
    assert finding.detail == "group 1 was due in step 3, and trained in step 4"


# --- the command -------------------------------------------------------------------------------


def run_with(folder: Path, events: Sequence[AnyEvent]) -> RunFolder:
    run = RunFolder(folder)
    with Journal(run.journal) as journal:
        for event in events:
            journal.append(event)
    return run


def test_the_command_tells_of_every_group(tmp_path):
    run_with(tmp_path, [*BEGAN, *group(0), *group(1, Outcome.FAILED), *group(2), *step(0, 0)])
    rows = tmp_path / "rows.jsonl"
    result = CliRunner().invoke(app, ["audit", "run", str(tmp_path), "--report", str(rows)])
    assert result.exit_code == 0, result.output
    assert "nothing lost, none twice in 1 steps" in result.output
    fates = [json.loads(line)["fate"] for line in rows.read_text().splitlines()]
    assert fates == ["trained", "failed", "open"]


def test_a_violation_is_an_exit_code_and_a_line(tmp_path):
    run = run_with(tmp_path, [*BEGAN, *group(0), *group(2), *step(0, 0)])
    run.mark_finished(Stage.RL)
    result = CliRunner().invoke(app, ["audit", "run", str(tmp_path)])
    assert result.exit_code == 1
    assert "lost: group 1 was never admitted" in result.output


def damaged_journal(run: RunFolder) -> None:
    (path,) = run.journal.iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "options", "why"),
    [
        (lambda run: shutil.rmtree(run.root), (), "there is no such folder"),
        (lambda run: shutil.rmtree(run.journal), (), "has no journal"),
        (damaged_journal, (), "is damaged at byte"),
        (lambda run: run.metrics.write_text("{}\n[\n{}\n"), (), "line 2 is no JSON"),
        (lambda run: None, ("--report", "/nowhere/rows.jsonl"), "/nowhere/rows.jsonl: No such"),
    ],
)
def test_what_cannot_be_audited_is_refused_by_name(tmp_path, spoil, options, why):
    run = run_with(tmp_path / "run", [*BEGAN, *group(0), *step(0, 0)])
    spoil(run)
    result = CliRunner().invoke(app, ["audit", "run", str(run.root), *options])
    assert result.exit_code == 2
    assert why in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_that_goes_on_is_audited_up_to_what_is_written(tmp_path):
    run = run_with(tmp_path, [*BEGAN, *group(0), *step(0, 0)])
    with Journal(run.journal):
        (newest,) = [path for path in run.journal.iterdir() if path.stat().st_size == 0]
        newest.write_bytes(b"\x20\0\0\0half of")
        run.metrics.write_text('{"stage": "rl", "step": 0}\n{"stage": "rl", "st')
        result = CliRunner().invoke(app, ["audit", "run", str(tmp_path)])
    assert result.exit_code == 0, result.output
