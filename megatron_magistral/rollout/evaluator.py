"""Held-out results of a run's policy: before and after the stage on all engines, and beside
training on one that keeps its version."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from megatron_magistral.config import Config
from megatron_magistral.evals.periodic import PeriodicEvaluation
from megatron_magistral.evals.report import EvalReport
from megatron_magistral.evals.run import evaluate
from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.rollout.generator import SamplingSettings
from megatron_magistral.rollout.pipeline import Encode, Grader
from megatron_magistral.rollout.pool_parts import Pin
from megatron_magistral.run_folder import RunFolder, Stage
from megatron_magistral.trainer.checkpoint_files import Best, CheckpointFolder
from megatron_magistral.types import Completion, Problem

log = logging.getLogger(__name__)

Generate = Callable[[Sequence[int], SamplingSettings], Awaitable[Completion]]


class Evaluator:
    """`sampling` is asked at each evaluation: the longest completion changes with the stage."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        pool: EnginePool,
        held_out: Sequence[Problem],
        encode: Encode,
        sampling: Callable[[float, float], SamplingSettings],
        grade: Grader,
    ) -> None:
        assert config.rl is not None
        self._settings, self._concurrency = config.evaluation, config.rl.n_async
        self._num_replicas, self._last_version = config.generator.num_replicas, config.rl.num_steps
        self._run, self._pool = run, pool
        self._held_out = held_out[: self._settings.num_problems]
        self._encode, self._sampling, self._grade = encode, sampling, grade
        self._checkpoints = CheckpointFolder(run.checkpoints(Stage.RL))
        self._newest: dict[str, float] = {}
        self._beside = PeriodicEvaluation(
            pool, self._pinned, self._keep, every_steps=self._settings.every_steps
        )

    async def whole(self, path: Path) -> None:
        """Evaluate the present version on all engines, and write `path`."""
        report = await self._report(self._pool.generate, self._pool.version, self._concurrency)
        report.save(path)
        log.info("pass@1 %s at version %d", report.overall.pass_at_1, self._pool.version)
        self._offer(self._pool.version, report)

    def weights_changed(self, version: int) -> None:
        """Generators hold `version` now: evaluate it beside training, if that is due."""
        if 0 < version < self._last_version:  # these two are evaluated as a whole
            self._beside.weights_changed(version)

    async def watch(self) -> None:
        """Raise, as soon as it fails, what is no fault of an engine."""
        await self._beside.watch()

    async def finish(self) -> None:
        """Wait for the evaluation that goes on."""
        await self._beside.finish()
        self._checkpoints.release()

    async def cancel(self) -> None:
        """End the evaluation that goes on: what it is of is trained anew."""
        await self._beside.cancel()
        self._checkpoints.release()

    def metrics(self) -> dict[str, float]:
        """Of the newest evaluation beside training; nothing where there are to be none."""
        if not self._settings.every_steps:
            return {}
        return self._newest | self._beside.metrics()

    async def _pinned(self, pin: Pin) -> EvalReport:
        # It may take longer than the newest checkpoints are kept, and this one may be the best.
        self._checkpoints.hold(pin.version)
        # One engine's share of what all of them have in flight.
        concurrency = max(1, self._concurrency // self._num_replicas)
        generate = functools.partial(self._pool.generate_on, pin)
        return await self._report(generate, pin.version, concurrency)

    def _keep(self, version: int, report: EvalReport) -> None:
        report.save(self._run.evaluation(version))
        score = report.overall.pass_at_1
        log.info("pass@1 %s at version %d, beside training", score, version)
        self._newest = {"eval_version": float(version)}
        if score is not None:
            self._newest["eval_pass_at_1"] = score
        if report.mean_reward is not None:
            self._newest["eval_mean_reward"] = report.mean_reward
        self._offer(version, report)
        self._checkpoints.release()

    def _offer(self, version: int, report: EvalReport) -> None:
        """The checkpoint of the best version is kept."""
        values = {"pass_at_1": report.overall.pass_at_1, "mean_reward": report.mean_reward}
        value = values[self._settings.best_by]
        if value is not None and version > 0:  # before the first step there is no checkpoint
            best = self._checkpoints.offer_best(Best(version, self._settings.best_by, value))
            log.info("best so far: %s %.3f after step %d", best.metric, best.value, best.step)

    async def _report(self, generate: Generate, version: int, concurrency: int) -> EvalReport:
        sampling = self._sampling(self._settings.temperature, self._settings.top_p)

        async def sample(problem: Problem) -> Completion:
            return await generate(self._encode(problem), sampling)

        return await evaluate(
            self._held_out,
            sample,
            self._grade,
            num_samples=self._settings.num_samples,
            concurrency=concurrency,
            protocol={
                "temperature": self._settings.temperature,
                "top_p": self._settings.top_p,
                "max_new_tokens": sampling.max_new_tokens,
                "version": version,
            },
        )
