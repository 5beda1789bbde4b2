"""Checkpoints as files: whatever moment a process is killed at, one can be gone on from."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magistral.trainer.checkpoint_files import (
    Best,
    CheckpointError,
    CheckpointFolder,
    SavedState,
    digest,
    retained,
)
from megatron_magistral.types import Progress

PART = "__0_0.distcp"


def write(folder: CheckpointFolder, step: int, content: bytes = b"weights") -> None:
    """A whole save, as rank 0 does it."""
    directory = folder.begin(step)
    (directory / PART).write_bytes(content * step)
    (directory / "common.pt").write_bytes(b"common")
    state = SavedState(Progress(step), {"tp": 2}, {})
    folder.commit(step, state, {PART: digest(directory / PART)})


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def test_a_saved_checkpoint_is_the_latest_and_intact(folder):
    assert folder.latest() is None
    for step in (10, 20):
        write(folder, step)
        assert folder.latest() == step
        folder.verify(step)
        assert folder.state(step).progress == Progress(step)
    assert folder.steps() == [10, 20]


def test_what_is_being_written_is_not_yet_a_checkpoint(folder):
    write(folder, 10)
    (folder.begin(20) / PART).write_bytes(b"half")
    assert (folder.steps(), folder.latest()) == ([10], 10)


def test_a_complete_checkpoint_is_never_written_to_again(folder):
    write(folder, 10)
    with pytest.raises(CheckpointError, match=r"step-00000010: is there already"):
        folder.begin(10)


# --- killed at every point --------------------------------------------------------------------

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}  # audit events
FORK = multiprocessing.get_context("fork")


def save_and_die(root: Path, num_changes: int, saved: Any) -> None:
    """Saves steps 10 and 20, keeping one; dies before it changes the file system once more."""
    num_left = num_changes

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal num_left
        opens_to_write = event == "open" and "w" in str(arguments[1])
        if event in CHANGES or opens_to_write:
            if num_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            num_left -= 1

    sys.addaudithook(count)
    folder = CheckpointFolder(root)
    for step in (10, 20):
        write(folder, step)
        saved.value = step
        folder.prune(keep_last=1, keep_multiples_of=0)


def test_killed_at_any_point_the_last_checkpoint_is_usable_and_nothing_else_is_left(tmp_path):
    num_points = 0
    while True:
        root = tmp_path / str(num_points)
        saved = FORK.Value("i", 0)
        process = FORK.Process(target=save_and_die, args=(root, num_points, saved))
        process.start()
        process.join(timeout=60)
        assert process.exitcode in (0, -signal.SIGKILL)
        folder = CheckpointFolder(root)
        before = folder.latest() or 0
        assert before >= saved.value
        if before:
            folder.verify(before)
        folder.recover()
        latest = folder.latest() or 0
        assert latest >= before
        if latest:
            folder.verify(latest)
            assert folder.state(latest).progress.next_step == latest
        names = {path.name for path in root.iterdir()} if root.exists() else set()
        assert names <= {"latest", *(f"step-{step:08d}" for step in (10, 20))}
        write(folder, 40)  # and it can be gone on from
        assert folder.latest() == 40
        if process.exitcode == 0:
            break
        num_points += 1
    assert num_points > 20


def test_one_that_was_completed_but_not_named_becomes_the_latest(folder):
    write(folder, 10)
    write(folder, 20)
    (folder.root / "latest").write_text("step-00000010\n")
    assert folder.recover() == []
    assert folder.latest() == 20


# --- damaged ----------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (PART, cut, rf"{PART}: has 139 bytes; 140 were written"),
        (PART, change, rf"{PART}: does not hold what was written \(SHA-256 differs\)"),
        (PART, Path.unlink, rf"{PART}: cannot be read: No such file"),
        ("common.pt", change, r"common\.pt: does not hold what was written"),
        ("state.json", change, r"state\.json: does not hold what was written"),
        ("manifest.json", cut, r"manifest\.json: is damaged: "),
        ("manifest.json", Path.unlink, r"manifest\.json: cannot be read: No such file"),
    ],
)
def test_damage_is_one_error_that_names_the_file_and_another_way_on(folder, name, damage, message):
    write(folder, 10)
    write(folder, 20)
    damage(folder.path(20) / name)
    if name == "manifest.json" and damage is cut:
        (folder.path(20) / name).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=message) as caught:
        folder.verify(20)
    assert str(caught.value).startswith(str(folder.path(20) / name))
    assert str(caught.value).endswith(
        "`magistral resume RUN --step 10` goes on from step 10 and trains steps 10 to 19 again"
    )
    folder.verify(10)


def test_without_another_checkpoint_the_error_says_so(folder):
    write(folder, 10)
    cut(folder.path(10) / PART)
    with pytest.raises(CheckpointError, match=r"there is no other checkpoint of this stage$"):
        folder.verify(10)


def test_a_share_of_the_files_can_be_verified_alone(folder):
    write(folder, 10)
    names = folder.files(10)
    assert names[0] == max(names, key=lambda name: (folder.path(10) / name).stat().st_size)
    change(folder.path(10) / PART)
    folder.verify(10, [name for name in names if name != PART])
    with pytest.raises(CheckpointError, match=PART):
        folder.verify(10, [PART])


def test_a_marker_of_something_that_is_gone_is_an_error_with_the_ways_on(folder):
    write(folder, 10)
    write(folder, 20)
    folder.path(20).rename(folder.root / "elsewhere")
    with pytest.raises(CheckpointError, match=r"latest: names 'step-00000020', which is not there"):
        folder.latest()
    with pytest.raises(CheckpointError, match=r"resume RUN --step 10` goes on from step 10$"):
        folder.recover()


# --- which are kept ---------------------------------------------------------------------------


@given(
    st.sets(st.integers(1, 200), min_size=1),
    st.integers(1, 5),
    st.sampled_from([0, 1, 7, 20]),
)
def test_the_newest_stay_and_the_multiples_and_nothing_else(steps, keep_last, multiples_of):
    kept = retained(sorted(steps), keep_last, multiples_of)
    newest = set(sorted(steps)[-keep_last:])
    assert newest <= kept <= steps
    for step in steps - newest:
        assert (step in kept) == (multiples_of > 0 and step % multiples_of == 0)


def test_pruning_deletes_what_is_not_kept_whole(folder):
    for step in (10, 20, 30, 40, 50):
        write(folder, step)
    folder.prune(keep_last=2, keep_multiples_of=20)
    assert folder.steps() == [20, 40, 50]
    assert {path.name for path in folder.root.iterdir()} == {
        "latest",
        *(folder.path(step).name for step in (20, 40, 50)),
    }


def test_pruning_never_deletes_the_latest_nor_one_that_is_being_written(folder):
    for step in (10, 20, 30):
        write(folder, step)
    folder.begin(40)
    (folder.root / "latest").write_text("step-00000010\n")
    folder.prune(keep_last=1, keep_multiples_of=0)
    assert (folder.steps(), folder.latest()) == ([10, 30], 10)
    assert (folder.root / "saving-step-00000040").is_dir()


# --- going back -------------------------------------------------------------------------------


def test_the_best_of_what_was_evaluated_is_kept_until_a_better_one_is_found(folder):
    for step in (10, 20, 30):
        write(folder, step)
    folder.offer_best(Best(10, "pass_at_1", 0.5))
    folder.prune(keep_last=1, keep_multiples_of=0)
    assert folder.steps() == [10, 30]
    assert folder.offer_best(Best(30, "pass_at_1", 0.4)) == Best(10, "pass_at_1", 0.5)
    folder.offer_best(Best(30, "pass_at_1", 0.6))
    write(folder, 40)
    folder.prune(keep_last=1, keep_multiples_of=0)
    assert folder.steps() == [30, 40]


def test_a_checkpoint_may_be_the_best_before_it_is_written(folder):
    folder.offer_best(Best(10, "pass_at_1", 0.5))
    for step in (10, 20, 30):
        write(folder, step)
    folder.prune(keep_last=1, keep_multiples_of=0)
    assert folder.steps() == [10, 30]


def test_one_that_is_being_evaluated_is_kept_until_it_is_released(folder):
    folder.hold(10)  # before it is written
    for step in (10, 20, 30, 40):
        write(folder, step)
        folder.prune(keep_last=1, keep_multiples_of=0)
    assert (folder.steps(), folder.held()) == ([10, 40], 10)
    folder.release()
    folder.release()
    folder.prune(keep_last=1, keep_multiples_of=0)
    assert (folder.steps(), folder.held()) == ([40], None)


@pytest.mark.parametrize("meanwhile", ["held", "best"])
def test_an_evaluation_that_ends_while_checkpoints_are_pruned_keeps_the_best(
    folder, monkeypatch, meanwhile
):
    """Another process names the best and releases what it held, after one of both was read."""
    for step in (10, 20, 30):
        write(folder, step)
    folder.hold(10)
    read = getattr(folder, meanwhile)

    def overtaken():
        found = read()
        CheckpointFolder(folder.root).offer_best(Best(10, "pass_at_1", 0.5))
        CheckpointFolder(folder.root).release()
        return found

    monkeypatch.setattr(folder, meanwhile, overtaken)
    folder.prune(keep_last=1, keep_multiples_of=0)
    assert folder.steps() == [10, 30]


def test_trainers_that_recover_leave_alone_what_the_evaluation_is_writing(folder, monkeypatch):
    """It belongs to another process, which lives on when trainers begin anew."""
    write(folder, 10)
    replace = Path.replace

    def overtaken(draft: Path, target: Path) -> Path:
        CheckpointFolder(folder.root).recover()
        return replace(draft, target)

    monkeypatch.setattr(Path, "replace", overtaken)
    folder.hold(10)
    folder.offer_best(Best(10, "pass_at_1", 0.5))
    assert (folder.held(), folder.best()) == (10, Best(10, "pass_at_1", 0.5))


def test_going_back_releases_what_is_set_aside_and_nothing_else(folder):
    for step in (10, 20, 30):
        write(folder, step)
    folder.hold(20)
    folder.go_back(20)
    assert folder.held() == 20
    folder.go_back(10)
    assert folder.held() is None


def test_another_metric_starts_anew(folder):
    folder.offer_best(Best(10, "pass_at_1", 0.5))
    assert folder.offer_best(Best(20, "mean_reward", 0.1)).step == 20


def test_going_back_forgets_a_best_that_is_set_aside(folder):
    for step in (10, 20):
        write(folder, step)
    folder.offer_best(Best(20, "pass_at_1", 0.5))
    folder.go_back(10)
    assert folder.best() is None


def test_a_damaged_note_of_the_best_is_named(folder):
    write(folder, 10)
    folder.offer_best(Best(10, "pass_at_1", 0.5))
    (folder.root / "best.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"best\.json: is damaged"):
        folder.prune(keep_last=1, keep_multiples_of=0)


def test_going_back_sets_later_checkpoints_aside_and_deletes_nothing(folder):
    for step in (10, 20, 30):
        write(folder, step)
    assert folder.go_back(10) == [20, 30]
    assert (folder.steps(), folder.latest()) == ([10], 10)
    assert folder.recover() == []
    assert folder.latest() == 10
    for step in (20, 30):
        assert (folder.root / f"set-aside-step-{step:08d}" / PART).is_file()
    write(folder, 20)
    assert folder.latest() == 20


def test_going_back_to_a_step_without_a_checkpoint_names_those_there_are(folder):
    write(folder, 10)
    write(folder, 20)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 15; .* of steps 10, 20$"):
        folder.go_back(15)
