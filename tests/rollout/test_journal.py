"""What was appended is there after any end of the process, and only what is needed is kept."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magistral.rollout import journal as module
from megatron_magistral.rollout.events import Admitted, Finished, Rewarded, Sampled, Trained
from megatron_magistral.rollout.journal import (
    FENCE,
    Journal,
    JournalError,
    frame,
    read_journal,
    segments_of,
)
from megatron_magistral.rollout.ledger import Ledger, Restored
from tests.rollout.histories import PROBLEMS, History

EVENTS = list(History(seed=0).events(400))
CONTENT = (Sampled, Finished, Rewarded)


def write(folder: Path, *processes: list) -> None:
    for events in processes:
        with Journal(folder) as journal:
            for event in events:
                journal.append(event)


def test_what_several_processes_appended_comes_back_in_order(tmp_path):
    write(tmp_path, EVENTS[:100], EVENTS[100:250], EVENTS[250:])
    assert list(read_journal(tmp_path)) == EVENTS
    assert len(segments_of(tmp_path)) == 3


def test_a_sync_returns_when_a_killed_process_could_lose_nothing(tmp_path):
    async def killed_after_sync() -> None:
        journal = Journal(tmp_path).__enter__()
        for event in EVENTS:
            journal.append(event)
        await journal.sync()  # no __exit__: nothing else is written

    asyncio.run(killed_after_sync())
    assert list(read_journal(tmp_path)) == EVENTS


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_record_that_was_cut_off_costs_itself_alone(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("journal")
    events = EVENTS[:20]
    write(folder, events)
    (path,) = segments_of(folder)
    end = data.draw(st.integers(0, path.stat().st_size))
    os.truncate(path, end)
    sizes = [len(FENCE + b"".join(map(frame, events[:count]))) for count in range(len(events) + 1)]
    num_whole = max((count for count, size in enumerate(sizes) if size <= end), default=0)
    assert list(read_journal(folder)) == events[:num_whole]
    write(folder, EVENTS[20:30])
    assert list(read_journal(folder)) == events[:num_whole] + EVENTS[20:30]


def test_garbage_after_a_crash_of_the_machine_is_cut_off(tmp_path):
    write(tmp_path, EVENTS[:20])
    (path,) = segments_of(tmp_path)
    with path.open("ab") as file:
        file.write(bytes(100))
    write(tmp_path, EVENTS[20:])
    assert list(read_journal(tmp_path)) == EVENTS


def test_damage_elsewhere_is_an_error_that_says_where(tmp_path):
    write(tmp_path, EVENTS[:20], EVENTS[20:])
    path = segments_of(tmp_path)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(JournalError, match=rf"{path}: is damaged at byte \d+ of {len(content)}"):
        list(read_journal(tmp_path))


WRITES = [EVENTS[start : start + 10] for start in range(0, 60, 10)]


def write_in_parts(folder: Path) -> bytes:
    """One segment, a sync after each part; by a process that was killed."""

    async def scenario() -> None:
        journal = Journal(folder).__enter__()
        for events in WRITES:
            for event in events:
                journal.append(event)
            await journal.sync()

    asyncio.run(scenario())
    return segments_of(folder)[0].read_bytes()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damage_before_the_last_write_is_named_and_never_taken_for_its_end(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("journal")
    content = bytearray(write_in_parts(folder))
    (path,) = segments_of(folder)
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    num_safe = sum(map(len, WRITES[:-1]))
    try:
        found = list(read_journal(folder))
    except JournalError as error:
        assert f"{path}: is damaged at byte" in str(error)
        with pytest.raises(JournalError, match="is damaged at byte"):
            Journal(folder).__enter__()  # and nothing is cut off
        assert path.read_bytes() == content
    else:
        assert place >= content.rindex(FENCE)
        assert found[:num_safe] == EVENTS[:num_safe]


def test_all_of_a_journal_that_was_closed_is_whole(tmp_path):
    write(tmp_path, EVENTS[:20])
    (path,) = segments_of(tmp_path)
    content = bytearray(path.read_bytes())
    content[-20] ^= 1  # of the last record
    path.write_bytes(content)
    with pytest.raises(JournalError, match="is damaged at byte"):
        list(read_journal(tmp_path))


def test_what_the_message_says_about_a_damaged_journal_helps(tmp_path):
    write(tmp_path, EVENTS[:20])
    (path,) = segments_of(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(JournalError) as failure:
        list(read_journal(tmp_path))
    (size,) = re.findall(r"`truncate --size=(\d+)`", str(failure.value))
    os.truncate(path, int(size))
    found = list(read_journal(tmp_path))
    assert found and found == EVENTS[: len(found)]


def test_a_write_that_failed_halfway_is_repeated_whole(tmp_path, monkeypatch):
    """As when a disk was full for a moment: what comes later builds on it."""
    real, is_full = os.write, True

    def half(descriptor: int, content: memoryview) -> int:
        if is_full and len(content) < 300:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content[: len(content) // 2] if is_full else content)

    async def scenario() -> None:
        nonlocal is_full
        with Journal(tmp_path) as journal:
            for event in EVENTS[:20]:
                journal.append(event)
            with pytest.raises(JournalError, match="No space left"):
                await journal.sync()
            assert list(read_journal(tmp_path)) == []
            journal.append(EVENTS[20])
            is_full = False

    monkeypatch.setattr(module.os, "write", half)
    asyncio.run(scenario())
    assert list(read_journal(tmp_path)) == EVENTS[:21]


def test_a_segment_may_be_replaced_and_another_grow_while_they_are_read(tmp_path):
    """As an audit of a run that goes on meets them."""
    write(tmp_path, EVENTS[:200])

    async def scenario() -> None:
        with Journal(tmp_path) as journal:
            reader = read_journal(tmp_path)
            found = [next(reader)]
            for event in EVENTS[200:]:
                journal.append(event)
            await journal.compact(set)
            found += reader
            assert found[:200] == EVENTS[:200]

    asyncio.run(scenario())


def test_a_disk_that_takes_no_more_is_an_error_that_says_where(tmp_path):
    async def scenario() -> None:
        journal = Journal(tmp_path).__enter__()
        os.close(journal._descriptor)
        journal._descriptor = os.open("/dev/full", os.O_WRONLY)
        journal.append(EVENTS[0])
        await journal.sync()

    with pytest.raises(JournalError, match=rf"{tmp_path}/00000000.events: .* No space left"):
        asyncio.run(scenario())


def test_a_segment_that_cannot_be_begun_is_an_error_and_the_one_before_goes_on(
    tmp_path, monkeypatch
):
    real, is_full = os.open, False

    def full(path, flags: int, mode: int = 0o777) -> int:
        if is_full and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, mode)

    async def scenario() -> None:
        nonlocal is_full
        with Journal(tmp_path) as journal:
            journal.append(EVENTS[0])
            is_full = True
            with pytest.raises(JournalError, match=r"00000001.events: .* No space left"):
                await journal.compact(set)
            is_full = False
            journal.append(EVENTS[1])

    monkeypatch.setattr(module.os, "open", full)
    asyncio.run(scenario())
    assert list(read_journal(tmp_path)) == EVENTS[:2]
    assert len(segments_of(tmp_path)) == 1


def test_a_write_that_comes_after_the_end_begins_no_segment(tmp_path):
    """Of a thread that waited for its turn when its caller was cancelled."""
    with Journal(tmp_path) as journal:
        journal.append(EVENTS[0])
    journal._write(begin_segment=True)
    assert len(segments_of(tmp_path)) == 1


def test_a_segment_does_not_grow_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_SEGMENT_BYTES", 2000)

    async def scenario() -> None:
        with Journal(tmp_path) as journal:
            for event in EVENTS:
                journal.append(event)
                await journal.sync()

    asyncio.run(scenario())
    assert list(read_journal(tmp_path)) == EVENTS
    largest = max(len(FENCE + frame(event)) for event in EVENTS)
    sizes = [path.stat().st_size for path in segments_of(tmp_path)]
    assert max(sizes) <= 2000 + largest + len(FENCE)


# --- compaction --------------------------------------------------------------------------------


def compact(folder: Path, kept: set[int]) -> None:
    async def scenario() -> None:
        with Journal(folder) as journal:
            await journal.compact(lambda: kept)

    asyncio.run(scenario())


def test_compaction_drops_the_content_of_groups_that_have_left_and_nothing_else(tmp_path):
    write(tmp_path, EVENTS[:200], EVENTS[200:])
    kept = {3, 7}
    compact(tmp_path, kept)
    found = list(read_journal(tmp_path))
    without = [e for e in EVENTS if not isinstance(e, CONTENT) or e.ordinal in kept]
    assert [type(event) for event in found] == [type(event) for event in without]
    assert [e for e in found if getattr(e, "ordinal", 3) in kept] == [
        e for e in EVENTS if getattr(e, "ordinal", 3) in kept
    ]
    assert all(
        e.prompt_ids == () for e in found if isinstance(e, Admitted) and e.ordinal not in kept
    )


def test_what_was_compacted_says_the_same_of_the_groups_that_are_kept(tmp_path):
    write(tmp_path, EVENTS)
    num_steps = sum(isinstance(event, Trained) for event in EVENTS)
    before = restored(tmp_path, num_steps)
    compact(tmp_path, needed(before))
    after = restored(tmp_path, num_steps)
    assert after.how is before.how
    assert (after.waiting, after.unfinished) == (before.waiting, before.unfinished)
    assert (after.next_ordinal, after.outcomes) == (before.next_ordinal, before.outcomes)


def test_a_compaction_that_was_killed_leaves_everything_readable(tmp_path):
    write(tmp_path, EVENTS)
    draft = segments_of(tmp_path)[0].with_name("00000000.events.partial")
    draft.write_bytes(b"half")
    write(tmp_path, [])
    assert not draft.exists()
    assert list(read_journal(tmp_path)) == EVENTS


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("num_compacted", range(4))
def test_a_compaction_that_was_killed_between_two_segments_changes_nothing(
    tmp_path, monkeypatch, num_compacted
):
    """Groups have their tokens in several of them."""
    write(tmp_path, EVENTS[:100], EVENTS[100:200], EVENTS[200:300], EVENTS[300:])
    num_steps = sum(isinstance(event, Trained) for event in EVENTS)
    before = restored(tmp_path, num_steps)
    left = iter(range(num_compacted))
    real = module._compact

    def killed(path: Path, kept: Collection[int]) -> set[int]:
        if next(left, None) is None:
            raise Killed
        return real(path, kept)

    monkeypatch.setattr(module, "_compact", killed)
    with pytest.raises(Killed):
        compact(tmp_path, needed(before))
    after = restored(tmp_path, num_steps)
    assert (after.waiting, after.unfinished) == (before.waiting, before.unfinished)
    assert (after.next_ordinal, after.outcomes) == (before.next_ordinal, before.outcomes)


def test_segments_in_which_nothing_can_go_are_left_alone(tmp_path):
    async def scenario() -> None:
        with Journal(tmp_path) as journal:
            await journal.compact(lambda: {3})
            first = segments_of(tmp_path)[0]
            written = first.stat().st_ino
            await journal.compact(lambda: {3})
            assert first.stat().st_ino == written
            await journal.compact(set)
            assert first.stat().st_ino != written

    write(tmp_path, EVENTS)
    asyncio.run(scenario())


def restored(folder: Path, step: int) -> Restored:
    ledger = Ledger()
    for event in read_journal(folder):
        ledger.apply(event)
    return ledger.restore(step, PROBLEMS)


def needed(restored: Restored) -> set[int]:
    """The groups of which a resume from there needs the content."""
    waiting = {group.ordinal for group, _ in restored.waiting}
    unfinished = {group.ordinal for group in restored.unfinished}
    return waiting | unfinished | {g.ordinal for batch in restored.repeated for g in batch()}
