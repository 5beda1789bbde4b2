"""What the model of the rollout pipeline takes and returns. Pure values.

Lengths and progress are in tokens, times in seconds, counts in completions unless said.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

SampleLength = Callable[[random.Random], float]
"""Draws the length of one completion, in tokens."""


class Handover(StrEnum):
    """How the trainer picks the groups of a step."""

    KEEP = "keep"
    """The oldest of what is completed; nothing waits for a slow group, however stale it gets: the
    product's queue without rl.max_staleness."""
    BOUNDED = "bounded"
    """The oldest of all. A group is admitted, and a batch taken, only if all that are left can
    still be trained within the bound: the product's queue with rl.max_staleness."""
    DISCARD_STALE = "discard_stale"
    """The baseline: a group older than the bound is thrown away when its turn comes."""


class Mode(StrEnum):
    ASYNCHRONOUS = "asynchronous"
    """Generators never wait for the trainer, until the queue is full."""
    ONE_STEP_OFF = "one-step-off"
    """A batch is generated while the one before it is trained, and nothing beyond it."""
    SYNCHRONOUS = "synchronous"
    """A batch is generated, then trained: one of the two stands idle at any time."""


@dataclass(frozen=True)
class Settings:
    """Counts are completions; `max_staleness` is in policy versions and unused by KEEP.

    `drop_share` of the groups teach nothing and are replaced. Raises ValueError for counts that
    cannot fill a batch of whole groups.
    """

    n_async: int
    n_batch: int
    queue_capacity: int
    group_size: int
    handover: Handover = Handover.KEEP
    max_staleness: int = 1
    drop_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("n_async", "n_batch", "queue_capacity"):
            if getattr(self, name) % self.group_size != 0:
                raise ValueError(
                    f"{name} = {getattr(self, name)}: must be a multiple of "
                    f"group_size = {self.group_size}"
                )
        if self.n_async + self.queue_capacity < self.n_batch:
            raise ValueError(
                f"n_async + queue_capacity = {self.n_async + self.queue_capacity}: must be at "
                f"least n_batch = {self.n_batch}, or no batch is ever full"
            )
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness = {self.max_staleness}: must be at least 0")
        if not 0 <= self.drop_share < 1:
            raise ValueError(f"drop_share = {self.drop_share}: must be at least 0 and below 1")


def in_mode(settings: Settings, mode: Mode) -> Settings:
    """The same batches in another mode: without asynchrony at most one batch is not yet taken."""
    if mode is Mode.ASYNCHRONOUS:
        return settings
    return replace(
        settings,
        n_async=settings.n_batch,
        queue_capacity=0,
        handover=Handover.BOUNDED if mode is Mode.SYNCHRONOUS else Handover.KEEP,
        max_staleness=0,  # with it nothing is admitted before the new weights are there
    )


@dataclass(frozen=True)
class Speeds:
    """How fast each part is. By default a token takes one second, and nothing else any time.

    `rates[n]` is the tokens/s of each of n completions that run at once; more than the last n wait
    in their generator. Reading the prompt of a new one holds all of them up by `start_s`: what it
    takes one generator, divided by their number. A batch of T tokens, prompts included, takes
    `train_s + T / train_tokens_per_s`; then the trainer sends weights for `update_s`, during whose
    last `pause_s` generation stands still. One of `num_verifiers` grades a completion in
    `verify_s`; None: there are always enough of them.
    """

    rates: tuple[float, ...] | None = None
    start_s: float = 0.0
    train_s: float = 0.0
    train_tokens_per_s: float = math.inf
    update_s: float = 0.0
    pause_s: float = 0.0
    verify_s: float = 0.0
    num_verifiers: int | None = None
    prompt_tokens: float = 0.0

    def __post_init__(self) -> None:
        if self.pause_s > self.update_s:
            raise ValueError(
                f"pause_s = {self.pause_s}: must be at most update_s = {self.update_s}"
            )
        if self.rates is not None and (len(self.rates) < 2 or min(self.rates[1:]) <= 0):
            raise ValueError("rates: must hold a positive rate for 1 completion and each count on")


@dataclass(slots=True)
class Totals:
    """Integrals over time since the start, in seconds x what is said."""

    running: float = 0.0  # completions
    idle: float = 0.0  # 1 while generators have nothing to do
    paused: float = 0.0  # 1 while new weights arrive
    kv_tokens: float = 0.0  # tokens in the caches, prompts included
    waiting: float = 0.0  # completions in the queue
    training: float = 0.0  # 1 while the trainer trains or sends weights
    verifying: float = 0.0  # verifiers at work
    generated: float = 0.0  # tokens (no time)


@dataclass(frozen=True)
class SimulatedGroup:
    ordinal: int
    version: int
    """Policy version at admission."""
    lengths: tuple[float, ...]


@dataclass(frozen=True)
class Step:
    """One trained batch; staleness of a group is the number of versions since its admission.

    `version` is the one that was trained, `totals` what all steps so far took.
    """

    finished_at: float
    version: int
    groups: tuple[SimulatedGroup, ...]
    staleness: tuple[int, ...]
    totals: Totals


@dataclass(frozen=True)
class Trace:
    """A whole run. `starts[i]` and `lengths[i]` are of completion i, `group_size` in a row a group:
    the progress at which it began, and its tokens; it ended at progress starts[i] + lengths[i].
    `updates[v - 1]` is the progress at which version v came."""

    settings: Settings
    steps: tuple[Step, ...]
    starts: tuple[float, ...]
    lengths: tuple[float, ...]
    updates: tuple[float, ...]
    peak_kv_tokens: float
