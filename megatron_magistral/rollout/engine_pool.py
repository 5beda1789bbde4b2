"""The generators of a run as one: least-loaded choice, and a gate that closes while weights change.

Requests in flight go on through a weight update; only requests that were not yet sent wait. A
request carries the policy version as its cache salt, so that no request reuses a prefix that older
weights computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from megatron_magistral.rollout.generator import SamplingSettings
from megatron_magistral.types import Completion


class Engine(Protocol):
    """What the pool needs of a generator."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingSettings, *, cache_salt: str
    ) -> Completion: ...


class EnginePool:
    """Spreads requests over engines that all hold policy `version`."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._load = [0] * len(engines)
        self._gate = asyncio.Event()
        self.version = -1

    @property
    def is_open(self) -> bool:
        return self._gate.is_set()

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingSettings) -> Completion:
        await self._gate.wait()
        index = self._load.index(min(self._load))
        self._load[index] += 1
        try:
            return await self._engines[index].generate(
                prompt_ids, sampling, cache_salt=f"v{self.version}"
            )
        finally:
            self._load[index] -= 1

    def close_gate(self) -> None:
        """Hold back new requests: a weight update begins."""
        self._gate.clear()

    def open_gate(self, version: int) -> None:
        """Every engine holds `version` now."""
        self.version = version
        self._gate.set()

    async def wait_open(self) -> None:
        await self._gate.wait()
