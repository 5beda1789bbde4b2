"""The journal keeps what a resume from one of the newest checkpoints needs, and no more."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from megatron_magistral.rollout import journal as journal_module
from megatron_magistral.rollout.audit import audit
from megatron_magistral.rollout.events import (
    AnyEvent,
    Closed,
    Finished,
    How,
    Outcome,
    Sampled,
    Taken,
    Trained,
    pack_ids,
    pack_logprobs,
)
from megatron_magistral.rollout.journal import Journal, read_journal
from megatron_magistral.rollout.ledger import Ledger, Restored
from megatron_magistral.rollout.recorder import Recorder
from megatron_magistral.trainer.checkpoint_files import CheckpointFolder, SavedState
from megatron_magistral.types import FinishReason, Progress, Span
from tests.rollout.histories import PROBLEMS, History

EVENTS = [event for event in History(seed=3).events(1500)][1:]
NUM_STEPS = sum(isinstance(event, Trained) for event in EVENTS)
EVERY = 4
KEEP_LAST = 2


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def record(folder: Path, checkpoints: CheckpointFolder, events: list[AnyEvent]) -> None:
    """A run that is begun, saves every so often, and is killed."""

    async def scenario() -> None:
        with Recorder(Journal(folder), checkpoints, KEEP_LAST) as recorder:
            await recorder.restore(0, PROBLEMS)
            for event in events:
                recorder.record(event)
                if isinstance(event, Trained) and (event.step + 1) % EVERY == 0:
                    checkpoints.begin(event.step + 1)
                    saved = SavedState(Progress(event.step + 1), {}, {})
                    checkpoints.commit(event.step + 1, saved, {})
                    await recorder.tidy()

    asyncio.run(scenario())


def resume(folder: Path, checkpoints: CheckpointFolder, step: int) -> Restored:
    async def scenario() -> Restored:
        with Recorder(Journal(folder), checkpoints, KEEP_LAST) as recorder:
            return await recorder.restore(step, PROBLEMS)

    return asyncio.run(scenario())


def replay(step: int) -> Restored:
    ledger = Ledger()
    for event in EVENTS:
        ledger.apply(event)
    return ledger.restore(step, PROBLEMS)


def test_there_is_something_to_tidy():
    assert NUM_STEPS > 6 * EVERY


def test_a_resume_from_a_newest_checkpoint_finds_everything(tmp_path, checkpoints):
    record(tmp_path / "journal", checkpoints, EVENTS)
    for step in checkpoints.steps()[-KEEP_LAST:]:
        found, expected = resume(tmp_path / "journal", checkpoints, step), replay(step)
        assert found.how is How.REPEATED
        assert [b() for b in found.repeated] == [b() for b in expected.repeated]
        assert (found.waiting, found.unfinished) == (expected.waiting, expected.unfinished)
        assert found.next_ordinal == expected.next_ordinal


def test_what_is_recorded_while_it_tidies_up_keeps_its_content(tmp_path, checkpoints):
    """A slow disk: groups are admitted after it was said what to keep, in a segment that is still
    open then."""
    split = next(i for i, e in enumerate(EVENTS) if isinstance(e, Trained) and e.step == 3 * EVERY)
    last = split + next(i for i, e in enumerate(EVENTS[split:]) if isinstance(e, Taken))

    async def scenario() -> None:
        journal = Journal(tmp_path / "journal")
        with Recorder(journal, checkpoints, KEEP_LAST) as recorder:
            await recorder.restore(0, PROBLEMS)
            for event in EVENTS[:split]:
                recorder.record(event)
            for step in (2 * EVERY, 3 * EVERY):
                checkpoints.begin(step)
                checkpoints.commit(step, SavedState(Progress(step), {}, {}), {})
            with journal._writing:
                tidying = asyncio.create_task(recorder.tidy())
                await asyncio.sleep(0.01)
                for event in EVENTS[split:last]:
                    recorder.record(event)
            await tidying

    asyncio.run(scenario())
    ledger = Ledger()
    for event in EVENTS[:last]:
        ledger.apply(event)
    found, expected = (
        resume(tmp_path / "journal", checkpoints, 3 * EVERY),
        ledger.restore(3 * EVERY, PROBLEMS),
    )
    assert [b() for b in found.repeated] == [b() for b in expected.repeated]
    assert (found.waiting, found.unfinished) == (expected.waiting, expected.unfinished)


def test_a_group_that_leaves_while_it_tidies_up_is_there_if_nobody_else_learns_of_it(
    tmp_path, checkpoints, monkeypatch
):
    """The process is killed before it has written that the group left."""
    saved = next(i for i, e in enumerate(EVENTS) if isinstance(e, Trained) and e.step == 3 * EVERY)
    last = 1 + next(i for i, e in enumerate(EVENTS) if i > saved and is_drop(e))
    dropped = EVENTS[last - 1].ordinal
    split = 1 + max(saved, next(i for i in range(last) if has_tokens(EVENTS[i], dropped)))
    is_closed, may_go_on = threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        is_closed.set()
        assert may_go_on.wait(60)

    async def scenario() -> None:
        recorder = Recorder(Journal(tmp_path / "journal"), checkpoints, KEEP_LAST).__enter__()
        await recorder.restore(0, PROBLEMS)
        for event in EVENTS[:split]:
            recorder.record(event)
        for step in (2 * EVERY, 3 * EVERY):
            checkpoints.begin(step)
            checkpoints.commit(step, SavedState(Progress(step), {}, {}), {})
        recorder._append_tokens()
        monkeypatch.setattr(journal_module, "_sync_folder", slow)
        tidying = asyncio.create_task(recorder.tidy())
        assert await asyncio.to_thread(is_closed.wait, 60)
        for event in EVENTS[split:last]:
            recorder.record(event)
        may_go_on.set()
        await tidying

    asyncio.run(scenario())
    ledger = Ledger()
    for event in EVENTS[:split]:
        ledger.apply(event)
    found = resume(tmp_path / "journal", checkpoints, 3 * EVERY)
    assert found.unfinished == ledger.restore(3 * EVERY, PROBLEMS).unfinished


def is_drop(event: AnyEvent) -> bool:
    return isinstance(event, Closed) and event.outcome is Outcome.DROPPED


def has_tokens(event: AnyEvent, ordinal: int) -> bool:
    return isinstance(event, Sampled) and event.ordinal == ordinal


def test_tokens_that_no_resume_needs_are_gone_and_the_audit_still_knows_all(tmp_path, checkpoints):
    record(tmp_path / "journal", checkpoints, EVENTS)
    events = list(read_journal(tmp_path / "journal"))
    oldest = checkpoints.steps()[-KEEP_LAST]
    taken = {o: e.step for e in EVENTS if isinstance(e, Taken) for o in e.ordinals}
    dropped = {
        e.ordinal for e in EVENTS if isinstance(e, Closed) and e.outcome is not Outcome.TAKEN
    }
    left = {event.ordinal for event in events if isinstance(event, Finished)}
    long_ago = {ordinal for ordinal, step in taken.items() if step < oldest}
    assert long_ago and not left & long_ago
    assert len(left & dropped) < len(dropped) / 2  # all but those since the last checkpoint
    assert audit(events).rows == audit(EVENTS).rows


def test_a_checkpoint_from_before_that_is_gone_on_from_with_new_samples(tmp_path, checkpoints):
    record(tmp_path / "journal", checkpoints, EVENTS)
    restored = resume(tmp_path / "journal", checkpoints, EVERY)
    assert restored.how is How.ANEW
    assert restored.repeated == () and restored.generate_from == EVERY
    again = resume(tmp_path / "journal", checkpoints, EVERY)
    assert [group.ordinal for group in again.unfinished] == [
        group.ordinal for group in restored.unfinished
    ]
    assert audit(read_journal(tmp_path / "journal")).findings == ()


def sampled(start: int, count: int, version: int = 0) -> Sampled:
    return Sampled(0, 0, start, pack_ids([5] * count), pack_logprobs([-1.0] * count), version)


def recorded(folder: Path, checkpoints: CheckpointFolder, *events: AnyEvent) -> list[AnyEvent]:
    with Recorder(Journal(folder), checkpoints, KEEP_LAST) as recorder:
        for event in events:
            recorder.record(event)
    return list(read_journal(folder))


def test_chunks_that_follow_each_other_are_one_record(tmp_path, checkpoints):
    finished = Finished(0, 0, (Span(0, 0, 4),), FinishReason.STOP, "")
    events = recorded(tmp_path, checkpoints, sampled(0, 1), sampled(1, 1), sampled(2, 2), finished)
    assert events == [sampled(0, 4), finished]


@pytest.mark.parametrize("second", [sampled(1, 1, version=1), sampled(0, 1), sampled(0, 2)])
def test_a_chunk_of_other_weights_or_from_before_the_end_is_a_record_of_its_own(
    tmp_path, checkpoints, second
):
    assert recorded(tmp_path, checkpoints, sampled(0, 1), second) == [sampled(0, 1), second]


def test_tokens_reach_the_disk_without_being_asked_to(tmp_path, checkpoints, monkeypatch):
    monkeypatch.setattr("megatron_magistral.rollout.recorder.FLUSH_S", 0.01)

    async def scenario() -> list[AnyEvent]:
        recorder = Recorder(Journal(tmp_path), checkpoints, KEEP_LAST).__enter__()
        serving = asyncio.create_task(recorder.serve())
        recorder.record(sampled(0, 3))
        async with asyncio.timeout(30):
            while not (found := list(read_journal(tmp_path))):
                await asyncio.sleep(0.01)
        serving.cancel()  # and killed: no __exit__
        return found

    assert asyncio.run(scenario()) == [sampled(0, 3)]


def test_what_was_recorded_before_a_step_was_taken_is_on_the_disk(tmp_path, checkpoints):
    async def scenario() -> list[AnyEvent]:
        recorder = Recorder(Journal(tmp_path), checkpoints, KEEP_LAST).__enter__()
        recorder.record(sampled(0, 3))
        await recorder.record_taken(Taken(0, ()))
        return list(read_journal(tmp_path))

    found = asyncio.run(scenario())
    assert len(found) == 2 and sampled(0, 3) in found and Taken(0, ()) in found
