"""Keeps the journal of a run: what happens goes in, what no resume can need any more goes out.

Tokens that follow each other become one record, so that the journal takes 8 bytes a token and some
for each completion and half a second.

A resume starts from one of the newest checkpoints, and repeats the steps after it. So the tokens of
a group are kept until it was trained before the oldest of these, or left untrained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from megatron_magistral.rollout.events import (
    Admitted,
    AnyEvent,
    Began,
    Closed,
    Finished,
    How,
    Outcome,
    Sampled,
    Taken,
)
from megatron_magistral.rollout.journal import Journal, read_journal
from megatron_magistral.rollout.ledger import BYTES_PER_TOKEN, Ledger, Restored
from megatron_magistral.trainer.checkpoint_files import CheckpointFolder
from megatron_magistral.types import Problem

FLUSH_S = 0.5
TIDY_S = 2.0


class _Tokens:
    """Chunks of one completion that follow each other."""

    def __init__(self, first: Sampled) -> None:
        self.first = first
        self.ids = bytearray(first.ids)
        self.logprobs = bytearray(first.logprobs)

    def take(self, chunk: Sampled) -> bool:
        """Whether the chunk goes on where these end, with the same weights: then it is taken."""
        end = self.first.start + len(self.ids) // BYTES_PER_TOKEN
        if (chunk.start, chunk.version) != (end, self.first.version):
            return False
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs
        return True

    def event(self) -> Sampled:
        ids, logprobs = bytes(self.ids), bytes(self.logprobs)
        return msgspec.structs.replace(self.first, ids=ids, logprobs=logprobs)


class Recorder:
    """The journal, and whose tokens it has to keep. `keep_last` checkpoints can be resumed from.

    A context manager, like the journal: leaving it writes what is left, whatever the reason.
    """

    def __init__(self, journal: Journal, checkpoints: CheckpointFolder, keep_last: int) -> None:
        self._journal = journal
        self._checkpoints = checkpoints
        self._keep_last = keep_last
        self._kept: set[int] = set()
        self._taken: dict[int, int] = {}  # of the kept ones, in which step
        self._tidied = 0  # steps before this one are compacted
        self._tokens: dict[tuple[int, int], _Tokens] = {}  # by group and member

    def __enter__(self) -> Recorder:
        self._journal.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._append_tokens()
        self._journal.__exit__(*exception)

    async def restore(
        self, step: int, problems: Mapping[str, Problem], max_staleness: int | None = None
    ) -> Restored:
        """What the journal says of a run whose trainers go on with `step`; see `Ledger.restore`.

        Raises JournalError or LedgerError.
        """
        await self.sync()
        restored = await asyncio.to_thread(self._replay, step, problems, max_staleness)
        self.record(Began(step, restored.how))
        await self.sync()
        return restored

    def record(self, event: AnyEvent) -> None:
        """It will be on the disk within FLUSH_S or so."""
        if isinstance(event, Sampled):
            key = (event.ordinal, event.member)
            if key in self._tokens and self._tokens[key].take(event):
                return
            self._append_tokens(key)
            self._tokens[key] = _Tokens(event)
            return
        if isinstance(event, Finished):
            self._append_tokens((event.ordinal, event.member))
        self._note(event)
        self._journal.append(event)

    async def sync(self) -> None:
        """Returns when everything that was recorded is on the disk."""
        self._append_tokens()
        await self._journal.sync()

    async def record_taken(self, taken: Taken) -> None:
        """Returns when it is on the disk: no batch is trained that the journal does not know."""
        self.record(taken)
        await self.sync()

    async def serve(self) -> None:
        """Flush and tidy up for ever. Raises JournalError once the disk does not take it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._flush_for_ever())
            tasks.create_task(self._tidy_for_ever())

    async def tidy(self) -> None:
        """Compact what is older than the checkpoints that a resume may start from."""
        newest = self._checkpoints.steps()[-self._keep_last :]
        if not newest or newest[0] <= self._tidied:
            return
        self._tidied = newest[0]
        for ordinal in [o for o, step in self._taken.items() if step < newest[0]]:
            del self._taken[ordinal]
            self._kept.discard(ordinal)
        await self._journal.compact(lambda: frozenset(self._kept))

    def _append_tokens(self, key: tuple[int, int] | None = None) -> None:
        """Those of one completion, or of all."""
        for each in [key] if key is not None else list(self._tokens):
            if tokens := self._tokens.pop(each, None):
                self._journal.append(tokens.event())

    async def _flush_for_ever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.sync()

    async def _tidy_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            await self.tidy()

    def _replay(
        self, step: int, problems: Mapping[str, Problem], max_staleness: int | None
    ) -> Restored:
        ledger = Ledger()
        self._kept, self._taken, self._tidied = set(), {}, 0
        for event in read_journal(self._journal.folder):
            ledger.apply(event)
            self._note(event)
        return ledger.restore(step, problems, max_staleness)

    def _note(self, event: AnyEvent) -> None:
        match event:
            case Admitted(ordinal=ordinal):
                self._kept.add(ordinal)
            case Closed(ordinal=ordinal, outcome=Outcome.DROPPED | Outcome.FAILED):
                self._kept.discard(ordinal)
            case Taken(step=step, ordinals=ordinals):
                self._taken |= dict.fromkeys(ordinals, step)
            case Began(step=first, how=How.ANEW):
                self._taken = {o: step for o, step in self._taken.items() if step < first}
