"""The rollout controller of a run: one asyncio process between engines, verifiers and trainers.

first weights -> evaluate -> roll out until every step is trained -> last weights -> evaluate

The trainers say from which step the stage goes on, at the start and whenever they begin anew. What
belongs to that step is replayed from the journal: batches that were taken after it are handed out
again, then generation goes on with every group where it was (see `ledger.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from transformers import PreTrainedTokenizerBase

from megatron_magistral.algorithm.batch import make_batch
from megatron_magistral.algorithm.entropy import EntropyController
from megatron_magistral.config import Config
from megatron_magistral.data.pass_rates import PassRates
from megatron_magistral.jsonl import drop_last_rows, read_rows
from megatron_magistral.metrics import MetricsWriter
from megatron_magistral.prompts import render_prompt
from megatron_magistral.rollout.completion import NewTokens
from megatron_magistral.rollout.desk import Desk
from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.rollout.evaluator import Evaluator
from megatron_magistral.rollout.events import Outcome, Taken, Trained
from megatron_magistral.rollout.generator import SamplingSettings
from megatron_magistral.rollout.journal import Journal
from megatron_magistral.rollout.kv_budget import KvLimits
from megatron_magistral.rollout.ledger import Restored
from megatron_magistral.rollout.pipeline import Grader, Pipeline
from megatron_magistral.rollout.prometheus import RunExposition
from megatron_magistral.rollout.queue import Admission, GroupQueue, QueueLimits
from megatron_magistral.rollout.recorder import Recorder
from megatron_magistral.rollout.stages import LaterStage, Stages
from megatron_magistral.rollout.stats import sample_row, spread
from megatron_magistral.rollout.telemetry import batch_metrics, live_metrics
from megatron_magistral.run_folder import RunFolder, Stage
from megatron_magistral.trainer.checkpoint_files import CheckpointFolder
from megatron_magistral.types import Batch, Completion, Group, Problem, Reward

log = logging.getLogger(__name__)

# So many batches' worth of groups in a row without one to train on end the run.
MAX_BARREN_BATCHES = 20
STOP_LOOK_S = 0.5


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
        later: Sequence[LaterStage] = (),
        *,
        verifier_metrics: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        assert config.rl is not None
        self._config, self._rl, self._run = config, config.rl, run
        self._pool, self._verifier_metrics = pool, verifier_metrics
        self._graders = (grade, *(stage.grade for stage in later))
        self._tokenizer, self._template = tokenizer, template
        problems = (train, *(stage.problems for stage in later))
        self._problems = {problem.id: problem for each in problems for problem in each}
        rates = PassRates(run.pass_rates)
        self._stages = Stages(config, problems, run.curriculum, rates)
        self._settings = self._rl.algorithm.settings(self._rl.num_minibatches)
        checkpoints = CheckpointFolder(run.checkpoints(Stage.RL))
        self._recorder = Recorder(Journal(run.journal), checkpoints, config.checkpoint.keep_last)
        self._queue, self._pipeline = self._rollout()
        self._evaluator = Evaluator(
            config, run, pool, held_out, self._encode, self._sampling, self._grade
        )
        self._entropy = self._entropy_before(0)
        self._exposition = RunExposition(
            lambda: {**live_metrics(self._queue, pool), **verifier_metrics()},
            lambda: pool.statuses,
        )
        self._metrics: MetricsWriter | None = None
        self._rollout_metrics: dict[str, float] = {}
        self._graded_before: frozenset[int] = frozenset()  # by another process, and in no row yet

    async def run(self, host: str, port: int) -> None:
        """Serve trainers until all steps are done; raises what made that impossible."""
        desk = Desk(
            self._pool,
            self._next_batch,
            self._on_trained,
            self._rl.num_steps,
            on_weights=self._weights_changed,
            waiting_for=lambda: self._queue.describe(),
            exposition=self._exposition.render,
        )
        self._run.metrics_url.write_text(f"http://{host}:{port}/metrics\n", encoding="utf-8")
        with self._recorder:
            async with desk.serve(host, port):
                while not desk.is_finished:
                    self._say("waiting for the first weights")
                    restored = await self._restore((await desk.started()).next_step)
                    desk.go_on()
                    await first_to_end(
                        desk.finished(),
                        self._generate(desk, restored),
                        self._recorder.serve(),
                        self._evaluator.watch(),
                        self._stop(desk),
                    )
                await self._evaluator.finish()
                self._say("evaluating after RL")
                await self._evaluator.whole(self._run.eval_after_rl)
        if self._metrics is not None:
            self._metrics.close()

    async def _restore(self, step: int) -> Restored:
        """Everything as it was for trainers that go on with `step`; drops what was recorded beyond
        it."""
        await self._evaluator.cancel()
        bound = self._rl.max_staleness
        restored = await self._recorder.restore(step, self._problems, bound)
        self._stages.restore(restored.step, restored.how)
        self._pool.kv.set_limits(kv_limits(self._stages.config))
        self._queue, self._pipeline = self._rollout()
        self._queue.restore(
            restored.step,
            restored.next_ordinal,
            repeated=restored.repeated,
            waiting=restored.waiting,
            unfinished=[
                (Admission(group.ordinal, group.version, group.due), group.num_unfinished)
                for group in restored.unfinished
            ],
        )
        self._queue.outcomes.update(restored.outcomes)
        self._graded_before = frozenset(group.ordinal for group, _ in restored.waiting)
        drop_last_rows(self._run.samples, lambda row: row["step"] >= step)
        if self._metrics is not None:
            self._metrics.close()
        self._metrics = MetricsWriter(self._run.root, "rl", step)
        self._entropy = self._entropy_before(step)
        return restored

    async def _weights_changed(self, version: int) -> None:
        await self._queue.weights_changed(version)
        self._evaluator.weights_changed(version)

    def _entropy_before(self, step: int) -> EntropyController:
        """The controller of eps_high as it was: what is recorded of earlier steps, replayed."""
        algorithm = self._rl.algorithm
        controller = EntropyController.start(algorithm.entropy.settings(), algorithm.eps_high)
        for row in read_rows(self._run.metrics):
            if row["stage"] == "rl" and row["step"] < step and "entropy" in row:
                controller = controller.observe(row["entropy"])
        return controller

    def _rollout(self) -> tuple[GroupQueue, Pipeline]:
        """An empty queue, and the pipeline that fills it."""
        queue = GroupQueue(queue_limits(self._stages.config))
        pipeline = Pipeline(
            self._stages,
            self._encode,
            self._sample_member,
            self._grade,
            queue,
            self._recorder.record,
            group_size=self._rl.group_size,
            on_closed=self._stages.group_done,
        )
        return queue, pipeline

    async def _generate(self, desk: Desk, restored: Restored) -> None:
        """Evaluate where that is due, then generate until cancelled."""
        await self._queue.wait_for_version(restored.step)
        if restored.step == 0 and not self._run.eval_before_rl.exists():
            self._say("evaluating before RL")
            await self._evaluator.whole(self._run.eval_before_rl)
        desk.open()
        if restored.repeated:
            self._say(f"repeating {len(restored.repeated)} steps after step {restored.step}")
        await self._queue.wait_for_version(restored.generate_from)
        self._say("reinforcement learning")
        await self._pipeline.run(restored.unfinished)

    async def _stop(self, desk: Desk) -> None:
        """Pass on a request to stop to the trainers, who save and end; then go on until ended."""
        while not self._run.stop_requested.exists():
            await asyncio.sleep(STOP_LOOK_S)
        self._say("stopping: the trainers save after their present step")
        desk.stop()
        await asyncio.Event().wait()

    def _say(self, phase: str) -> None:
        """What the run does now, for whoever watches it."""
        self._run.phase.write_text(phase, encoding="utf-8")
        log.info("%s", phase)

    def _encode(self, problem: Problem) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(render_prompt(problem.statement, self._template)))

    def _sampling(
        self, temperature: float, top_p: float, config: Config | None = None
    ) -> SamplingSettings:
        """By the settings of a stage, the present one if none is given."""
        config = config or self._stages.config
        return SamplingSettings(
            temperature=temperature,
            top_p=top_p,
            max_new_tokens=config.reward.l_max,
            stop_token_ids=(self._tokenizer.eos_token_id,),
        )

    async def _sample_member(
        self,
        prompt_ids: Sequence[int],
        *,
        ordinal: int,
        partial: Completion | None,
        on_tokens: Callable[[NewTokens], None],
    ) -> Completion:
        """A member of a group, by the settings of the group's stage."""
        config = self._stages.at(ordinal)
        settings = self._sampling(self._rl.temperature, self._rl.top_p, config)
        return await self._pool.generate(prompt_ids, settings, partial=partial, on_tokens=on_tokens)

    async def _grade(self, problem: Problem, completion: Completion, group: str) -> Reward:
        """By the settings of the group's stage; for an evaluation by those of the present one."""
        stage = self._stages.stage_of(int(group)) if group.isdigit() else self._stages.index
        return await self._graders[stage](problem, completion, group)

    async def _next_batch(self, step: int) -> Batch:
        if step > 0 and self._stages.step_trained(step - 1, self._queue.next_ordinal):
            self._say(f"reinforcement learning, stage {self._stages.index}")
        self._pool.kv.set_limits(kv_limits(self._stages.config))
        await self._queue.set_limits(queue_limits(self._stages.config))
        is_repeated = self._queue.num_repeated > 0
        groups = await self._queue.take()
        for group in groups:
            if is_repeated or group.ordinal in self._graded_before:
                self._pipeline.stats.add(group.members, Outcome.TAKEN)
        await self._recorder.record_taken(Taken(step, tuple(group.ordinal for group in groups)))
        batch = make_batch(
            step,
            groups,
            self._settings,
            num_ranks=self._config.parallel.data,
            seed=self._config.run.seed,
        )
        batch = replace(batch, eps_high=self._entropy.used(self._settings.eps_high))
        self._rollout_metrics = {
            **batch_metrics(
                batch, self._pipeline.stats, self._queue, self._pool, self._rl.microbatch_tokens
            ),
            **self._verifier_metrics(),
            **self._stages.metrics(),
            **self._entropy.metrics(self._settings.eps_high),
            **self._evaluator.metrics(),
        }
        self._write_samples(groups, step)
        return batch

    def _on_trained(self, step: int, trainer_metrics: dict[str, float]) -> None:
        assert self._metrics is not None, "no step is trained before the stage has started"
        self._recorder.record(Trained(step))
        row = self._rollout_metrics | trainer_metrics
        self._metrics.write(step, row)
        self._exposition.trained(step, row)
        if "entropy" in trainer_metrics:
            self._entropy = self._entropy.observe(trainer_metrics["entropy"])

    def _write_samples(self, groups: Sequence[Group], step: int) -> None:
        encode = msgspec.json.Encoder().encode
        with self._run.samples.open("ab") as file:
            for group, member in spread(groups, self._rl.keep_samples):
                file.write(encode(sample_row(group, step, member)) + b"\n")


def queue_limits(config: Config) -> QueueLimits:
    """Of the stage that `config` describes."""
    assert config.rl is not None
    return QueueLimits(
        n_async=config.rl.n_async,
        capacity=config.rl.queue_capacity,
        group_size=config.rl.group_size,
        groups_per_batch=config.rl.groups_per_batch,
        max_staleness=config.rl.max_staleness,
        max_barren_groups=MAX_BARREN_BATCHES * config.rl.groups_per_batch,
    )


def kv_limits(config: Config) -> KvLimits:
    """Of the stage that `config` describes."""
    assert config.rl is not None
    return KvLimits(config.rl.kv_budget_tokens, config.rl.kv_reserve)


async def first_to_end(
    goal: Coroutine[Any, Any, None], *services: Coroutine[Any, Any, None]
) -> None:
    """Wait for `goal` while services run, then end these. A failure of any is raised."""
    tasks = [asyncio.create_task(each) for each in (goal, *services)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
