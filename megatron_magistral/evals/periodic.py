"""Evaluations while training goes on: every so manieth version, on one engine that keeps it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import StrEnum

from megatron_magistral.evals.report import EvalReport
from megatron_magistral.rollout.engine_pool import EnginePool, Pin, PinLost

log = logging.getLogger(__name__)


class EvaluationOutcome(StrEnum):
    DONE = "done"
    SKIPPED = "skipped"  # the one before was still going on
    LOST = "lost"  # no engine to spare, or the one that was kept broke


class PeriodicEvaluation:
    """Of the versions that `pool` serves; `every_steps` = 0 evaluates none.

    `evaluate` samples and grades on the pinned engine; `record` gets what came of it. At most one
    evaluation goes on at a time: a version that is due meanwhile is skipped, and counted.
    """

    def __init__(
        self,
        pool: EnginePool,
        evaluate: Callable[[Pin], Awaitable[EvalReport]],
        record: Callable[[int, EvalReport], None],
        *,
        every_steps: int,
    ) -> None:
        self._pool, self._evaluate, self._record = pool, evaluate, record
        self._every_steps = every_steps
        self._task: asyncio.Task[None] | None = None
        self._has_failed = asyncio.Event()
        self.outcomes: Counter[EvaluationOutcome] = Counter()

    def weights_changed(self, version: int) -> None:
        """Generators hold `version` now: begin to evaluate it, if it is due."""
        if not self._every_steps or version % self._every_steps:
            return
        if self._task is not None and not self._task.done():
            self.outcomes[EvaluationOutcome.SKIPPED] += 1
            log.warning("version %d is not evaluated: an earlier one still is", version)
            return
        self._task = asyncio.create_task(self._run(version))
        self._task.add_done_callback(self._look)

    async def watch(self) -> None:
        """For ever, but for a failure that is not of an engine: it is raised as soon as it comes,
        since the run would meet it too."""
        await self._has_failed.wait()
        await self.finish()

    async def finish(self) -> None:
        """Wait for the evaluation that goes on.

        Raises what it raised, but for PinLost, which is counted.
        """
        if self._task is not None:
            await self._task

    async def cancel(self) -> None:
        """End the evaluation that goes on without its result."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def metrics(self) -> dict[str, float]:
        return {f"evaluations_{o}_total": float(self.outcomes[o]) for o in EvaluationOutcome}

    def _look(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._has_failed.set()

    async def _run(self, version: int) -> None:
        try:
            async with self._pool.pinned() as pin:
                if pin.version != version:
                    raise PinLost(f"version {version} had been replaced before it could be kept")
                report = await self._evaluate(pin)
            self.outcomes[EvaluationOutcome.DONE] += 1
            self._record(pin.version, report)
        except* PinLost as lost:  # of many requests at once
            self.outcomes[EvaluationOutcome.LOST] += 1
            log.warning("an evaluation is lost: %s", lost.exceptions[0])
