"""The parts of the controller that are more than wiring."""

import asyncio
import json
import os
import re
import signal

import pytest
from typer.testing import CliRunner

from megatron_magistral.config_file import load
from megatron_magistral.data.tokenizer import build_tokenizer
from megatron_magistral.jsonl import read_rows
from megatron_magistral.rollout import role
from megatron_magistral.rollout.controller import first_to_end
from megatron_magistral.rollout.events import Sampled
from megatron_magistral.rollout.journal import Journal, read_journal
from megatron_magistral.rollout.queue import NothingToLearn
from megatron_magistral.rollout.recorder import Recorder
from megatron_magistral.rollout.role import ended_by_sigterm, fitting, leaves, reward_settings
from megatron_magistral.rollout.stats import RolloutStats, sample_row, staleness_metrics
from megatron_magistral.run_folder import RunBusy, RunFolder
from megatron_magistral.trainer.checkpoint_files import CheckpointFolder
from megatron_magistral.types import GradeStatus, Span, TrainSequence
from tests.cli_runs import ROOT
from tests.fakes import graded_of, group_of, problem_of

TEMPLATE = "Problem: {problem}"


def sequence(*spans: Span) -> TrainSequence:
    num_tokens = spans[-1].end
    return TrainSequence(
        tokens=tuple(range(num_tokens + 2)),
        num_prompt_tokens=2,
        logprobs=(-1.0,) * num_tokens,
        spans=spans,
        advantage=0.0,
        weight=1.0,
    )


# --- first_to_end -----------------------------------------------------------------------------


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("ended")


async def briefly() -> None:
    await asyncio.sleep(0.01)


async def failing() -> None:
    await asyncio.sleep(0.01)
    raise RuntimeError("broken")


def test_the_service_is_ended_with_the_goal():
    ended: list[str] = []
    asyncio.run(first_to_end(briefly(), forever(ended)))
    assert ended == ["ended"]


@pytest.mark.parametrize("goal_fails", [True, False])
def test_a_failure_of_either_is_raised_and_ends_the_other(goal_fails):
    ended: list[str] = []

    async def run() -> None:
        goal, service = failing(), forever(ended)
        await first_to_end(*((goal, service) if goal_fails else (service, goal)))

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(run())
    assert ended == ["ended"]


def test_an_end_from_outside_ends_both():
    ended: list[str] = []

    async def run() -> None:
        both = asyncio.create_task(first_to_end(forever(ended), forever(ended)))
        await asyncio.sleep(0.01)
        both.cancel()
        await both

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert ended == ["ended", "ended"]


# --- how the process ends ----------------------------------------------------------------------


def test_what_was_sampled_is_in_the_journal_after_sigterm(tmp_path):
    event = Sampled(0, 0, 0, b"", b"", 0)

    async def work() -> None:
        with Recorder(Journal(tmp_path), CheckpointFolder(tmp_path), 1) as recorder:
            recorder.record(event)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ended_by_sigterm(work()))
    assert list(read_journal(tmp_path)) == [event]


def test_a_second_sigterm_breaks_off_what_waits_and_not_what_is_written(tmp_path):
    event = Sampled(0, 0, 0, b"", b"", 0)

    async def work() -> None:
        with Recorder(Journal(tmp_path), CheckpointFolder(tmp_path), 1) as recorder:
            recorder.record(event)
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(60)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(ended_by_sigterm(work()), 30))
    assert list(read_journal(tmp_path)) == [event]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: None, r"controller\.lock: is held by another process after 0 s"),
        (lambda run: run.metrics.write_text("[\n"), "metrics.jsonl: line 1 is no JSON"),
    ],
)
def test_what_a_user_can_put_right_is_a_line_and_no_traceback(
    tmp_path, monkeypatch, caplog, spoil, message
):
    async def control(config, run, *addresses) -> None:
        read_rows(run.metrics)
        raise RunBusy(f"{run.root / 'controller.lock'}: is held by another process after 0 s")

    monkeypatch.setattr(role, "control", control)
    monkeypatch.setattr(role, "load", lambda path: None)
    spoil(RunFolder(tmp_path))
    arguments = ["--run", str(tmp_path), "--port", "1", "--generators", ""]
    result = CliRunner().invoke(role.app, arguments)
    assert result.exit_code == 1
    assert re.search(message, caplog.text) and "Traceback" not in caplog.text


def test_the_causes_of_a_failure_are_found_in_groups_of_groups():
    first, second = NothingToLearn("one"), OSError("two")
    assert leaves(ExceptionGroup("", [ExceptionGroup("", [first]), second])) == [first, second]
    assert leaves(first) == [first]


# --- which problems are asked -----------------------------------------------------------------


def test_a_problem_whose_prompt_leaves_no_room_for_an_answer_is_set_aside_and_named(caplog):
    tokenizer = build_tokenizer(["one two three"], 300)
    short, long = problem_of("one", id="short"), problem_of("one two three " * 20, id="long")
    assert fitting([short, long], tokenizer, TEMPLATE, room=40) == [short]
    assert "set aside long: its prompt has" in caplog.text


def test_a_prompt_of_exactly_the_longest_length_is_kept():
    tokenizer = build_tokenizer(["one two three"], 300)
    problem = problem_of("one two")
    length = len(tokenizer.encode("Problem: one two"))
    assert fitting([problem], tokenizer, TEMPLATE, room=length) == [problem]
    with pytest.raises(ValueError, match=rf"at most {length - 1} tokens, which is what reward\.l"):
        fitting([problem], tokenizer, TEMPLATE, room=length - 1)


def test_the_reward_section_of_a_config_reaches_the_grader_whole():
    config = load(ROOT / "configs" / "tiny.yaml", ["reward.language=0.3", "reward.l_cache=7"])
    settings = reward_settings(config)
    for name in ("format", "correctness", "language", "length_penalty", "l_max", "l_cache"):
        assert getattr(settings, name) == getattr(config.reward, name)
    assert settings.proportional_code is config.reward.proportional_code


# --- what is reported -------------------------------------------------------------------------


def test_staleness_is_the_mean_age_of_the_tokens_not_of_the_sequences():
    batch = [sequence(Span(4, 0, 1), Span(5, 1, 4)), sequence(Span(3, 0, 6))]
    metrics = staleness_metrics(batch, version=5)
    assert metrics["staleness_mean"] == pytest.approx((1 * 1 + 3 * 0 + 6 * 2) / 10)
    assert metrics["staleness_max"] == 2
    assert metrics["mixed_version_sequences"] == pytest.approx(1 / 2)


def test_masked_completions_are_counted_and_lower_no_mean():
    stats = RolloutStats()
    masked = graded_of(0.0, status=GradeStatus.INFRASTRUCTURE)
    stats.add([graded_of(0.9, passed_fraction=1.0), graded_of(0.9, passed_fraction=1.0)], "taken")
    stats.add([masked, masked], "failed")
    metrics = stats.drain()
    assert (metrics["reward_mean"], metrics["solved"]) == (pytest.approx(0.9), 1.0)
    assert metrics["masked_completions"] == 2
    assert (metrics["groups_taken"], metrics["groups_failed"]) == (1, 1)


def test_each_drain_reports_what_came_since_the_last():
    stats = RolloutStats()
    stats.add([graded_of(0.9)], "taken")
    stats.drain()
    stats.add([graded_of(0.1)], "taken")
    assert stats.drain()["reward_mean"] == pytest.approx(0.1)
    assert "reward_mean" not in stats.drain()


def test_a_sample_row_is_json_that_tells_reward_and_versions():
    row = json.loads(json.dumps(sample_row(group_of(rewards=(0.9, 0.0)), step=3)))
    assert (row["step"], row["reward"], row["spans"]) == (3, 0.9, [[0, 0, 3]])
