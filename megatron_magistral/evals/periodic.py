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
    """Follows the versions that `pool` serves; `every_steps` = 0 evaluates none.

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
        self.outcomes: Counter[EvaluationOutcome] = Counter()

    def start(self, first_version: int, last_version: int) -> None:
        """Follow the versions between these two, which are evaluated otherwise."""

        def when_opened(version: int) -> None:
            is_due = self._every_steps and version % self._every_steps == 0
            if is_due and first_version < version < last_version:
                self._begin(version)

        self._pool.when_opened = when_opened

    async def finish(self) -> None:
        """Begin no other evaluation, and wait for the one that goes on.

        Raises what it raised, but for PinLost, which is counted.
        """
        self._pool.when_opened = lambda version: None
        if self._task is not None:
            await self._task

    async def cancel(self) -> None:
        """End the evaluation that goes on without its result."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def metrics(self) -> dict[str, float]:
        return {f"evaluations_{o}_total": float(self.outcomes[o]) for o in EvaluationOutcome}

    def _begin(self, version: int) -> None:
        if self._task is not None and not self._task.done():
            self.outcomes[EvaluationOutcome.SKIPPED] += 1
            log.warning("version %d is not evaluated: an earlier one still is", version)
            return
        if self._task is not None:
            self._task.result()  # a failure that was not of an engine is not passed over
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with self._pool.pinned() as pin:
                report = await self._evaluate(pin)
            self.outcomes[EvaluationOutcome.DONE] += 1
            self._record(pin.version, report)
        except* PinLost as lost:  # of many requests at once
            self.outcomes[EvaluationOutcome.LOST] += 1
            log.warning("an evaluation is lost: %s", lost.exceptions[0])
