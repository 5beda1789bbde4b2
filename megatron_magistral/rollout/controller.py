"""The rollout controller of a run: one asyncio process between engines, verifiers and trainers.

first weights -> evaluate -> roll out until every step is trained -> last weights -> evaluate

A stage that goes on after a checkpoint is told by the trainers from which step and prompt group.
Groups that were in flight or queued when the checkpoint was made are not asked again.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_magistral.algorithm.batch import make_batch
from megatron_magistral.config import Config
from megatron_magistral.evals.run import evaluate
from megatron_magistral.metrics import MetricsWriter, keep_rows
from megatron_magistral.prompts import render_prompt
from megatron_magistral.rollout.desk import Desk
from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.rollout.generator import SamplingSettings
from megatron_magistral.rollout.pipeline import Grader, Pipeline
from megatron_magistral.rollout.queue import GroupQueue, Outcome
from megatron_magistral.rollout.source import PromptSource
from megatron_magistral.rollout.stats import padding_metrics, sample_row, staleness_metrics
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.types import Batch, Completion, Group, Problem, Progress

log = logging.getLogger(__name__)

# So many batches' worth of groups in a row without one to train on end the run.
MAX_BARREN_BATCHES = 20


class Controller:
    def __init__(
        self,
        config: Config,
        run: RunFolder,
        pool: EnginePool,
        grade: Grader,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        train: Sequence[Problem],
        held_out: Sequence[Problem],
    ) -> None:
        assert config.rl is not None
        self._config, self._rl, self._run = config, config.rl, run
        self._pool, self._grade = pool, grade
        self._tokenizer, self._template = tokenizer, template
        self._held_out = held_out[: config.evaluation.num_problems]
        self._queue = GroupQueue(
            n_async=self._rl.n_async,
            capacity=self._rl.queue_capacity,
            group_size=self._rl.group_size,
            max_barren_groups=MAX_BARREN_BATCHES * self._rl.groups_per_batch,
        )
        self._pipeline = Pipeline(
            PromptSource(train, config.run.seed),
            functools.partial(self._sample, temperature=self._rl.temperature, top_p=self._rl.top_p),
            grade,
            self._queue,
            group_size=self._rl.group_size,
        )
        self._settings = self._rl.algorithm.settings(self._rl.num_minibatches)
        self._metrics: MetricsWriter | None = None
        self._rollout_metrics: dict[str, float] = {}

    async def run(self, host: str, port: int) -> None:
        """Serve trainers until all steps are done; raises what made that impossible."""
        desk = Desk(self._pool, self._next_batch, self._on_trained, self._rl.num_steps)
        async with desk.serve(host, port):
            self._say("waiting for the first weights")
            start = await desk.started()
            self._metrics = self._go_on(start)
            await self._pool.wait_open()
            if start.next_step == 0:
                self._say("evaluating before RL")
                await self._evaluate(self._run.eval_before_rl)
            self._say("reinforcement learning")
            desk.open()
            await first_to_end(desk.finished(), self._pipeline.run())
            self._say("evaluating after RL")
            await self._evaluate(self._run.eval_after_rl)
        self._metrics.close()

    def _go_on(self, start: Progress) -> MetricsWriter:
        """Admit and record from where the stage goes on; drop what was recorded beyond it."""
        self._queue.start_at(start.next_ordinal)
        keep_rows(self._run.samples, lambda row: row["step"] < start.next_step)
        return MetricsWriter(self._run.root, "rl", start.next_step)

    def _say(self, phase: str) -> None:
        """What the run does now, for whoever watches it."""
        self._run.phase.write_text(phase, encoding="utf-8")
        log.info("%s", phase)

    async def _sample(self, problem: Problem, *, temperature: float, top_p: float) -> Completion:
        prompt_ids = self._tokenizer.encode(render_prompt(problem.statement, self._template))
        sampling = SamplingSettings(
            temperature=temperature,
            top_p=top_p,
            max_new_tokens=self._config.reward.l_max,
            stop_token_ids=(self._tokenizer.eos_token_id,),
        )
        return await self._pool.generate(prompt_ids, sampling)

    async def _evaluate(self, path: Path) -> None:
        settings = self._config.evaluation
        report = await evaluate(
            self._held_out,
            functools.partial(self._sample, temperature=settings.temperature, top_p=settings.top_p),
            self._grade,
            num_samples=settings.num_samples,
            concurrency=self._rl.n_async,
            protocol={
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "max_new_tokens": self._config.reward.l_max,
                "version": self._pool.version,
            },
        )
        report.save(path)
        log.info("pass@1 %s at version %d", report.overall.pass_at_1, self._pool.version)

    async def _next_batch(self, step: int) -> Batch:
        groups = await self._queue.take(self._rl.groups_per_batch)
        batch = make_batch(
            step,
            groups,
            self._settings,
            num_ranks=self._config.parallel.data,
            seed=self._config.run.seed,
        )
        sequences = [s for minibatch in batch.minibatches for s in minibatch.sequences]
        self._rollout_metrics = self._pipeline.stats.drain() | {
            "queue_sequences": float(self._queue.num_waiting),
            "in_flight_sequences": float(self._queue.num_in_flight),
            **staleness_metrics(sequences, self._pool.version),
            **padding_metrics(batch, self._rl.microbatch_tokens),
            **{f"groups_{o}_total": float(self._queue.outcomes[o]) for o in Outcome},
        }
        self._write_samples(groups, step)
        return batch

    def _on_trained(self, step: int, trainer_metrics: dict[str, float]) -> None:
        assert self._metrics is not None, "no step is trained before the stage has started"
        self._metrics.write(step, self._rollout_metrics | trainer_metrics)

    def _write_samples(self, groups: Sequence[Group], step: int) -> None:
        with self._run.samples.open("a", encoding="utf-8") as file:
            for group in groups[: self._rl.keep_samples]:
                file.write(json.dumps(sample_row(group, step), ensure_ascii=False) + "\n")


async def first_to_end(goal: Coroutine[Any, Any, None], service: Coroutine[Any, Any, None]) -> None:
    """Wait for `goal` while `service` runs, then end the service. A failure of either is raised."""
    tasks = [asyncio.create_task(goal), asyncio.create_task(service)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
