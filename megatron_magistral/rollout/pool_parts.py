"""What an engine pool is made of and how it fails: the seam to an engine, bounds, errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_magistral.rollout.completion import NewTokens
from megatron_magistral.rollout.engine import EngineRefused, Phase
from megatron_magistral.rollout.generator import SamplingSettings
from megatron_magistral.types import Completion


class Engine(Protocol):
    """What the pool needs of a generator."""

    @property
    def name(self) -> str: ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        cache_salt: str,
        partial: Completion | None = None,
        on_tokens: Callable[[NewTokens], None] | None = None,
    ) -> Completion: ...

    def interrupt(self) -> None: ...

    async def wait_ready(self, timeout_s: float) -> None: ...

    async def weight_version(self) -> int: ...

    async def abandon_update(self) -> None: ...


@dataclass(frozen=True)
class PoolSettings:
    """Bounds, in seconds and counts.

    `suspect_s` is how long an engine may take to give a sign of life, `restart_s` how long to come
    back, `max_restarts` how often it is restarted in a run. `update_bound_s` is how long an update
    may take from its announcement to its end before its sender counts as lost. A request is tried
    on `max_tries` engines, and waits `wait_s` at most for one.
    """

    suspect_s: float = 30.0
    restart_s: float = 600.0
    max_restarts: int = 3
    update_bound_s: float = 900.0
    max_tries: int = 8
    wait_s: float = 1800.0


@dataclass(frozen=True)
class Pin:
    """An engine that keeps its version for a while."""

    engine: str
    version: int


class PinLost(RuntimeError):
    """The engine that was to keep its version broke, or was needed for training."""


class NoEngineLeft(RuntimeError):
    """No engine is left for a request; names all of them with what happened to each."""


def announced_alone(
    on_tokens: Callable[[NewTokens], None] | None,
    oldest: int,
    newest: Callable[[], int],
    engine: str,
) -> Callable[[NewTokens], None]:
    """Calls `on_tokens`, but not with tokens of weights before `oldest`, which the engine was to
    hold, or beyond the `newest` that was announced: nobody could train them in time, and once
    written down another process would go on from them.

    What it gives raises EngineRefused for these.
    """
    begin = time.monotonic()

    def arrived(new: NewTokens) -> None:
        if not oldest <= new.version <= newest():
            why = f"sampled with version {new.version}, must be of {oldest} to {newest()}"
            raise EngineRefused(engine, Phase.GENERATE, time.monotonic() - begin, why)
        if on_tokens is not None:
            on_tokens(new)

    return arrived


async def holds(condition: asyncio.Event) -> None:
    """Returns as soon as it is set, and while it is: it may be over before who waited runs."""
    while not condition.is_set():
        await condition.wait()


async def restarted_elsewhere(name: str) -> None:
    """For engines whose process is restarted by whoever started it, once it has ended."""
