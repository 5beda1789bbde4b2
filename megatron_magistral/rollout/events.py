"""What happens to prompt groups, as records of the journal. Their order is the state of a run.

    Admitted -> Sampled ... -> Finished -> Rewarded -> Closed -> Taken -> Trained
                (of each of its G members)            (of the group)     (of the step)

`Began` says from which step trainers went on, at the start and at every resume. A record is enough
to apply it to what came before; `ledger.py` does, `audit.py` checks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from megatron_magistral.types import Completion, FinishReason, Reward, Span


class Outcome(StrEnum):
    """How a group leaves the generators and verifiers. Only one that is TAKEN gets trained on."""

    TAKEN = "taken"
    DROPPED = "dropped"
    """All rewards are equal."""
    FAILED = "failed"
    """No member could be graded."""


class How(StrEnum):
    """What became of steps that were taken beyond the one that trainers go on from."""

    REPEATED = "repeated"
    """The same groups, with the same tokens, in the same order."""
    ANEW = "anew"
    """Their tokens are no longer kept: the groups are sampled again, before new ones."""


class Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One record."""


class Began(Event, frozen=True):
    """Trainers go on with `step`: those before it are trained."""

    step: int
    how: How = How.REPEATED


class Admitted(Event, frozen=True):
    """Group `ordinal` of `size` completions, when generators held `version`.

    It is to be trained in step `due` at the latest; None where staleness has no bound.
    """

    ordinal: int
    problem_id: str
    size: int
    version: int
    due: int | None
    prompt_ids: tuple[int, ...]
    """May be dropped once the group has left: it follows from the problem."""

    def again(self, version: int) -> Admitted:
        """As if it happened now that generators hold `version`."""
        due = None if self.due is None else version + self.due - self.version
        return msgspec.structs.replace(self, version=version, due=due)

    def due_under(self, max_staleness: int | None) -> int | None:
        """When it is due in a run that goes on with this bound: no later than was promised, and no
        later than if it had been admitted under the bound, or newer groups would overtake it for
        ever. That may be in the past: then it comes before all that are in time."""
        bounded = None if max_staleness is None else self.version + max_staleness
        return min((due for due in (self.due, bounded) if due is not None), default=None)


class Sampled(Event, frozen=True):
    """Tokens of one member from `start` on; what it had there before is no longer valid.

    `ids` are little-endian uint32; `logprobs` float32, which is what engines compute.
    """

    ordinal: int
    member: int
    start: int
    ids: bytes
    logprobs: bytes
    version: int


class Finished(Event, frozen=True):
    """The engine has ended the completion; these spans replace those of its chunks."""

    ordinal: int
    member: int
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    text: str


class Rewarded(Event, frozen=True):
    ordinal: int
    member: int
    reward: Reward


class Closed(Event, frozen=True):
    """Every member is graded, and so it is known what becomes of the group."""

    ordinal: int
    outcome: Outcome
    reason: str
    num_tokens: int
    versions: tuple[int, int]
    """Oldest and newest that sampled a token of it."""


class Taken(Event, frozen=True):
    """These groups are the batch of `step`, in this order."""

    step: int
    ordinals: tuple[int, ...]


class Trained(Event, frozen=True):
    """The trainers acknowledged the step."""

    step: int


AnyEvent = Began | Admitted | Sampled | Finished | Rewarded | Closed | Taken | Trained


def pack_ids(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def unpack_ids(packed: bytes | bytearray) -> tuple[int, ...]:
    return tuple(array("I", bytes(packed)))


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    return array("f", logprobs).tobytes()


def unpack_logprobs(packed: bytes | bytearray) -> tuple[float, ...]:
    return tuple(array("f", bytes(packed)))


def version_range(completions: Sequence[Completion]) -> tuple[int, int]:
    """Oldest and newest version of any token; (-1, -1) where there is none."""
    versions = [span.version for completion in completions for span in completion.spans]
    return (min(versions), max(versions)) if versions else (-1, -1)
