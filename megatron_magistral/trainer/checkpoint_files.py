"""Checkpoints as files: how one becomes visible, which are kept, and whether one is intact.

<run>/checkpoints/<stage>/step-00000020/     20 steps are done; complete, never written to again
                          saving-step-00000030/     being written
                          deleting-step-00000010/   being deleted
                          set-aside-step-00000040/  after a step that the run went back to
                          latest                    the name of the checkpoint to go on from
                          best.json                 the step that was evaluated best, and how well
                          held                      the name of the checkpoint being evaluated

Whatever moment the process or the machine dies at, `latest` names a complete checkpoint, or there
is none yet. A checkpoint is written beside the others, synced with a manifest of its files' sizes
and digests, renamed, and only then named; one that is deleted is renamed first.

One process writes (rank 0 of the trainer; `best.json` and `held` whoever evaluates); any may read.
No torch here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from megatron_magistral.trainer.fingerprint import differences
from megatron_magistral.types import Progress

MANIFEST = "manifest.json"
STATE = "state.json"
LATEST = "latest"
BEST = "best.json"
HELD = "held"
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or gone on from: says which file and why."""


class _Mark(StrEnum):
    """What stands before the name of a directory that is no checkpoint to go on from."""

    SAVING = "saving-"
    DELETING = "deleting-"
    SET_ASIDE = "set-aside-"


class FileDigest(msgspec.Struct, frozen=True):
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: dict[str, FileDigest]


class Best(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights of `step` have the highest `value` of `metric` so far."""

    step: int
    metric: str
    value: float


class SavedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint is of, for a reader that cannot open the tensors."""

    progress: Progress
    layout: dict[str, int | bool]
    """Of the ranks that saved it."""
    training: dict[str, Any]
    """What determines the training, by configuration key (see `fingerprint.py`)."""


def digest(path: Path) -> FileDigest:
    """Of what the file system gives back now."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(file.tell(), sha256)


def retained(steps: Sequence[int], keep_last: int, keep_multiples_of: int) -> set[int]:
    """Which of the checkpoints stay: the newest, and the multiples of a number if it is not 0."""
    newest = sorted(steps)[-keep_last:]
    kept = {step for step in steps if keep_multiples_of and step % keep_multiples_of == 0}
    return kept | set(newest)


class CheckpointFolder:
    """The checkpoints of one stage. Steps count what is done: 20 has trained steps 0 to 19."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        return self.root / _name(step)

    def steps(self) -> list[int]:
        """Complete checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> int | None:
        """The checkpoint to go on from, or None if there is none yet.

        Raises CheckpointError if the marker names something that is not there.
        """
        marker = self.root / LATEST
        try:
            name = marker.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        for step in self.steps():
            if _name(step) == name:
                return step
        raise CheckpointError(f"{marker}: names {name!r}, which is not there{self.hint()}")

    def best(self) -> Best | None:
        """The best step that was evaluated, or None if none was.

        Raises CheckpointError if what says so is damaged.
        """
        path = self.root / BEST
        try:
            return msgspec.json.decode(path.read_bytes(), type=Best)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"{path}: is damaged: {error}; it can be deleted") from error

    # --- writing ------------------------------------------------------------------------------

    def begin(self, step: int) -> Path:
        """An empty directory to write the checkpoint into.

        Raises CheckpointError if the step has a checkpoint: a complete one is never written to.
        """
        if self.path(step).exists():
            raise CheckpointError(f"{self.path(step)}: is there already")
        directory = self._marked(_Mark.SAVING, step)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        return directory

    def commit(self, step: int, state: SavedState, digests: Mapping[str, FileDigest]) -> None:
        """Makes what was written since `begin` the latest checkpoint.

        `digests` are of files that are synced already; all others are digested and synced here.
        """
        directory = self._marked(_Mark.SAVING, step)
        _write(directory / STATE, _pretty(state))
        files = dict(digests)
        for path in sorted(directory.iterdir()):
            if path.name not in files:
                _sync(path)
                files[path.name] = digest(path)
        _write(directory / MANIFEST, _pretty(Manifest(files)))
        _sync(directory)
        directory.rename(self.path(step))
        _sync(self.root)
        self._note(LATEST, step)

    def prune(self, keep_last: int, keep_multiples_of: int) -> None:
        """Deletes the checkpoints that the policy does not keep; never the latest, the
        best or the one that is held."""
        steps, held = self.steps(), self.held()
        best = self.best()  # after what is held: what is the best is released after it was named
        kept = {self.latest(), held, best.step if best else None}
        for step in set(steps) - retained(steps, keep_last, keep_multiples_of) - kept:
            doomed = self._marked(_Mark.DELETING, step)
            self.path(step).rename(doomed)
            shutil.rmtree(doomed)

    def offer_best(self, offer: Best) -> Best:
        """Keep the checkpoint of `offer.step`, which may still be written, if its value is higher
        than that of the best one so far; what is the best now."""
        best = self.best()
        if best is not None and best.metric == offer.metric and best.value >= offer.value:
            return best
        self.root.mkdir(parents=True, exist_ok=True)
        draft = self.root / f"{_Mark.SAVING}{BEST}"
        _write(draft, _pretty(offer))
        draft.replace(self.root / BEST)
        _sync(self.root)
        return offer

    def hold(self, step: int) -> None:
        """Keep this checkpoint, which may still be written, until `release`: it is evaluated."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._note(HELD, step)

    def release(self) -> None:
        (self.root / HELD).unlink(missing_ok=True)

    def held(self) -> int | None:
        try:
            match = _NAME.fullmatch((self.root / HELD).read_text(encoding="utf-8").strip())
        except FileNotFoundError:
            return None
        return int(match[1]) if match else None

    def recover(self) -> list[str]:
        """Tidies up after a process that died: what it was writing or deleting goes, what it had
        completed but not yet named becomes the latest. Returns the names of what was deleted."""
        if not self.root.is_dir():
            return []
        others = {f"{_Mark.SAVING}{name}" for name in (BEST, HELD)}  # who evaluates lives on
        leftovers = [
            path
            for path in sorted(self.root.iterdir())
            if path.name.startswith((_Mark.SAVING, _Mark.DELETING)) and path.name not in others
        ]
        for path in leftovers:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        newest = max(self.steps(), default=None)
        if newest is not None:
            latest = self.latest()
            if latest is None or latest < newest:
                self._note(LATEST, newest)
        return [path.name for path in leftovers]

    def go_back(self, step: int) -> list[int]:
        """Makes an earlier checkpoint the latest; those after it are set aside, not deleted.

        Returns the steps that were set aside. Raises CheckpointError if there is no such step.
        """
        later = [each for each in self._steps_with(step) if each > step]
        best = self.best()
        if best is not None and best.step > step:
            (self.root / BEST).unlink()
        if (self.held() or 0) > step:
            self.release()
        for each in reversed(later):
            self._set_aside(each)
        self._note(LATEST, step)
        return later

    def _set_aside(self, step: int) -> None:
        target = self._marked(_Mark.SET_ASIDE, step)
        shutil.rmtree(target, ignore_errors=True)
        self.path(step).rename(target)

    def _note(self, marker: str, step: int) -> None:
        """Writes the name of a checkpoint into a file that readers see whole."""
        draft = self.root / f"{_Mark.SAVING}{marker}"
        _write(draft, f"{_name(step)}\n".encode())
        draft.replace(self.root / marker)
        _sync(self.root)

    def _marked(self, mark: _Mark, step: int) -> Path:
        return self.root / f"{mark}{_name(step)}"

    # --- reading ------------------------------------------------------------------------------

    def state(self, step: int) -> SavedState:
        return self._decode(step, STATE, SavedState)

    def check_training(self, step: int, training: Mapping[str, Any]) -> None:
        """Raises CheckpointError with the keys on which the checkpoint's training differs."""
        if changed := differences(self.state(step).training, training):
            raise CheckpointError(
                f"{self.path(step)}: is of another training: {'; '.join(changed)}. To go on, put "
                "these back; to train with them, start a new run from a model of this one"
            )

    def files(self, step: int) -> list[str]:
        """Of the checkpoint, largest first, as its manifest names them."""
        files = self._decode(step, MANIFEST, Manifest).files
        return sorted(files, key=lambda name: (-files[name].num_bytes, name))

    def verify(
        self, step: int, names: Iterable[str] | None = None, *, sizes_only: bool = False
    ) -> None:
        """Reads the files, or those of `names`, and compares them with the manifest; or only looks
        at their sizes, which takes no time.

        Raises CheckpointError that names the first file which is missing or not as it was written,
        and what else there is to go on from.
        """
        self._steps_with(step)
        expected = self._decode(step, MANIFEST, Manifest).files
        for name in expected if names is None else names:
            path = self.path(step) / name
            try:
                size = path.stat().st_size
                found = FileDigest(size, expected[name].sha256) if sizes_only else digest(path)
            except OSError as error:
                raise self._damaged(step, path, f"cannot be read: {error.strerror}") from error
            if found.num_bytes != expected[name].num_bytes:
                raise self._damaged(
                    step,
                    path,
                    f"has {found.num_bytes} bytes; {expected[name].num_bytes} were written",
                )
            if found != expected[name]:
                raise self._damaged(step, path, "does not hold what was written (SHA-256 differs)")

    def hint(self, but: int | None = None) -> str:
        """What else there is to go on from, for the end of a message."""
        others = [step for step in self.steps() if step != but]
        if not others:
            return "; there is no other checkpoint of this stage"
        best = max((step for step in others if but is None or step < but), default=others[0])
        lost = f" and trains steps {best} to {but - 1} again" if but and best < but else ""
        return (
            f"; there are checkpoints of steps {', '.join(map(str, others))}: "
            f"`magistral resume RUN --step {best}` goes on from step {best}{lost}"
        )

    def _steps_with(self, step: int) -> list[int]:
        """All steps; raises CheckpointError if this one is not among them."""
        steps = self.steps()
        if step not in steps:
            raise CheckpointError(
                f"{self.root}: has no checkpoint of step {step}; there are those of steps "
                f"{', '.join(map(str, steps)) or '(none)'}"
            )
        return steps

    def _decode(self, step: int, name: str, kind: type[Any]) -> Any:
        path = self.path(step) / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except OSError as error:
            raise self._damaged(step, path, f"cannot be read: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise self._damaged(step, path, f"is damaged: {error}") from error

    def _damaged(self, step: int, path: Path, what: str) -> CheckpointError:
        return CheckpointError(f"{path}: {what}{self.hint(but=step)}")


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _pretty(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """A file's content, or a directory's entries, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
