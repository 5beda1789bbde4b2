"""The journal of a run: an append-only record of events, which survives whatever ends the process.

<run>/journal/00000003.events    frames of <length><CRC-32><msgpack of an event>

Records are on the disk when `sync` returns. Each process begins a segment of its own, and so does
each compaction. A write begins with a fence, and only after the write before it has reached the
disk. So a frame that is not whole and has no fence after it was being written when a process died:
the next process cuts it off. One that has a fence after it is damage, and an error that names it.

What is no longer needed goes: once the groups of a segment have left for good, `compact` rewrites
it without their tokens and rewards. Which groups there were, what became of them and when, stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from megatron_magistral.rollout.events import (
    Admitted,
    AnyEvent,
    Event,
    Finished,
    Rewarded,
    Sampled,
)

log = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 1 << 30
SUFFIX = ".events"
DRAFT = ".partial"
_HEAD = struct.Struct("<II")
FENCE = _HEAD.pack(0, 0x45434E46)
"""In the place of a frame's head; no frame is empty."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyEvent)


class JournalError(RuntimeError):
    """A journal that cannot be read or written; says where and why."""


class Journal:
    """Appends to the journal in `folder`, which the process must have for itself.

    A context manager: entering cuts off what a dead process left half-written and begins a segment;
    leaving it writes what is left, whatever the reason.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._frames: deque[bytes] = deque()
        self._unwritten = b""  # what a write that failed was to write
        self._writing = threading.Lock()
        self._compacting = threading.Lock()  # a thread goes on when its caller is cancelled
        self._segment = -1
        self._descriptor = -1
        self._num_bytes = 0
        self._content: dict[Path, set[int]] = {}  # whose tokens are left in a compacted segment

    def __enter__(self) -> Journal:
        self.folder.mkdir(parents=True, exist_ok=True)
        _recover(self.folder)
        self._begin_segment()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._compacting, self._writing:  # threads whose callers were cancelled go on
            try:
                self._write_frames()
                with contextlib.suppress(OSError):  # all is there; what damages it later shows
                    os.write(self._descriptor, FENCE)
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def append(self, event: Event) -> None:
        """It will be on the disk after the next `sync`, or at the end. Takes no time."""
        self._frames.append(frame(event))

    async def sync(self) -> None:
        """Returns when everything that was appended is on the disk. Raises JournalError."""
        await asyncio.to_thread(self._write)

    async def compact(self, kept: Callable[[], Collection[int]]) -> None:
        """Begin a segment; drop, from those before it, the content of all groups but `kept()`.

        It is asked before and after. Kept is a group that leaves meanwhile, of which only this
        process may know, and one that is admitted meanwhile, into a segment that is still open.
        """
        before = kept()
        await asyncio.to_thread(self._write, True)
        ordinals = {*before, *kept()}
        # The newest first: a process that dies between two leaves the beginning of what a group has
        # in both, which can be replayed.
        for path in segments_of(self.folder)[-2::-1]:
            if path not in self._content or not self._content[path] <= ordinals:
                self._content[path] = await asyncio.to_thread(self._compact, path, ordinals)

    def _compact(self, path: Path, kept: Collection[int]) -> set[int]:
        with self._compacting:
            return _compact(path, kept)

    def _write(self, begin_segment: bool = False) -> None:
        """What was appended, from any thread; a write that was begun is always ended."""
        with self._writing:
            self._write_frames()
            is_full = begin_segment or self._num_bytes > MAX_SEGMENT_BYTES
            if is_full and self._descriptor >= 0:
                self._begin_segment()

    def _write_frames(self) -> None:
        frames = (self._frames.popleft() for _ in range(len(self._frames)))
        self._unwritten = b"".join((self._unwritten, *frames))
        if self._unwritten:
            self._num_bytes += self._put(FENCE + self._unwritten)
            self._unwritten = b""

    def _put(self, content: bytes) -> int:
        """Append all of it to the segment, or nothing; how many bytes. Raises JournalError."""
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._num_bytes)
            what = f"{self._path(self._segment)}: cannot be written: {error.strerror}"
            raise JournalError(what) from error
        return len(content)

    def _begin_segment(self) -> None:
        """Raises JournalError; then the present segment goes on."""
        numbers = [int(path.name.removesuffix(SUFFIX)) for path in segments_of(self.folder)]
        number = max(numbers, default=-1) + 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        try:
            descriptor = os.open(self._path(number), flags, 0o644)
        except OSError as error:
            what = f"{self._path(number)}: cannot be begun: {error.strerror}"
            raise JournalError(what) from error
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._segment, self._descriptor, self._num_bytes = number, descriptor, 0
        _sync_folder(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}{SUFFIX}"


def frame(event: Event) -> bytes:
    content = _encoder.encode(event)
    return _HEAD.pack(len(content), zlib.crc32(content)) + content


def read_journal(folder: Path) -> Iterator[AnyEvent]:
    """Every event, in order; the last segment may end in a frame that was not written whole, and
    may be growing.

    Raises JournalError if a segment is damaged elsewhere.
    """
    paths = segments_of(folder)
    for path in paths:
        yield from _read(path, may_be_torn=path == paths[-1])


def segments_of(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob(f"*{SUFFIX}"))


class _Segment:
    """The frames of a file as it was when this was made, up to the first that is not whole. `end`
    is where the one begins that an iteration gave last and, after it, where all that is whole ends.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.end = 0

    def __iter__(self) -> Iterator[bytes]:
        while self.end + _HEAD.size <= self.size:
            head = self._file.read(_HEAD.size)
            if head != FENCE:
                length, checksum = _HEAD.unpack(head)
                is_there = 0 < length <= self.size - self._file.tell()
                content = self._file.read(length) if is_there else b""
                # A crash of the machine may leave zeros, and the checksum of nothing is 0.
                if not content or zlib.crc32(content) != checksum:
                    return
                yield content
            self.end = self._file.tell()

    @property
    def is_torn(self) -> bool:
        """Whether what is not whole was being written last: no other write began after it."""
        with mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_READ) as content:
            return content.find(FENCE, self.end) < 0

    def check(self, *, may_be_torn: bool) -> int:
        """How many bytes at the end are not whole. Raises JournalError where that is damage."""
        num_left = self.size - self.end
        if num_left and not (may_be_torn and self.is_torn):
            raise JournalError(
                f"{self._path}: is damaged at byte {self.end} of {self.size}, in what was written "
                f"whole. `truncate --size={self.end}` gives up what follows there; segments after "
                "it must then go too, and `magistral resume` says from which step a run can go on"
            )
        return num_left


def _read(path: Path, *, may_be_torn: bool) -> Iterator[AnyEvent]:
    with path.open("rb") as file:
        segment = _Segment(path, file)
        for content in segment:
            try:
                yield _decoder.decode(content)
            except msgspec.MsgspecError as error:
                raise JournalError(f"{path}: the record at byte {segment.end}: {error}") from error
        segment.check(may_be_torn=may_be_torn)


def _recover(folder: Path) -> None:
    """Remove drafts; cut the last segment after its last whole frame. Raises JournalError."""
    for draft in folder.glob(f"*{DRAFT}"):
        draft.unlink()
    for path in segments_of(folder)[-1:]:
        with path.open("rb+") as file:
            segment = _Segment(path, file)
            for _ in segment:
                pass
            if num_bytes := segment.check(may_be_torn=True):
                log.warning("%s: its last %d bytes were not written whole", path, num_bytes)
                file.truncate(segment.end)
                os.fsync(file.fileno())


def _compact(path: Path, kept: Collection[int]) -> set[int]:
    """Replace a segment by one without the content of other groups than `kept`; whose is left."""
    draft = path.with_name(path.name + DRAFT)
    left: set[int] = set()
    with draft.open("wb") as file:
        for event in _read(path, may_be_torn=False):
            ordinal: int | None = getattr(event, "ordinal", None)
            if ordinal is not None and ordinal in kept:
                left.add(ordinal)
                file.write(frame(event))
            elif (rest := without_content(event)) is not None:
                file.write(frame(rest))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    _sync_folder(path.parent)
    return left


def without_content(event: AnyEvent) -> AnyEvent | None:
    """What stays of an event of a group that has left."""
    match event:
        case Sampled() | Finished() | Rewarded():
            return None
        case Admitted():
            return msgspec.structs.replace(event, prompt_ids=())
    return event


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
