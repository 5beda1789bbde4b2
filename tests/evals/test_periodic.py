"""Evaluations beside training, on a pool of engines that answer when told to."""

from __future__ import annotations

import asyncio

import pytest

from megatron_magistral.evals.periodic import EvaluationOutcome, PeriodicEvaluation
from megatron_magistral.evals.report import EvalReport, summarise
from megatron_magistral.rollout.engine_pool import EnginePool, Pin
from tests.fakes import graded_of, problem_of
from tests.rollout.test_engine_pool import SAMPLING, Engine, ready, run, serve, settle

REPORT = summarise([(problem_of(), [graded_of(1.0)])], {"num_samples": 1})


class Bench:
    """Two engines, and an evaluation of a single request on the pinned one."""

    def __init__(self, engines: list[Engine], every_steps: int = 2) -> None:
        self.engines = engines
        self.pool = EnginePool(engines)
        self.recorded: list[int] = []
        self.failure: Exception | None = None
        self.periodic = PeriodicEvaluation(
            self.pool, self.evaluate, self.record, every_steps=every_steps
        )

    async def evaluate(self, pin: Pin) -> EvalReport:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(self.pool.generate_on(pin, [1], SAMPLING))
        return REPORT

    def record(self, version: int, report: EvalReport) -> None:
        assert report is REPORT
        if self.failure is not None:
            raise self.failure
        self.recorded.append(version)

    def update(self, version: int) -> None:
        free = [e for e in self.engines if e.name not in self.pool.pinned_engines]
        serve(self.pool, free, version)
        self.periodic.weights_changed(version)


def test_every_so_manieth_version_is_evaluated():
    async def scenario():
        bench = Bench([ready("e0"), ready("e1")])
        for version in range(1, 9):
            bench.update(version)
            await settle()
        await bench.periodic.finish()
        assert bench.recorded == [2, 4, 6, 8]

    run(scenario)


def test_zero_evaluates_none():
    async def scenario():
        bench = Bench([ready("e0"), ready("e1")], every_steps=0)
        for version in range(1, 5):
            bench.update(version)
        await bench.periodic.finish()
        assert bench.recorded == []

    run(scenario)


def test_updates_go_on_while_a_version_is_evaluated_and_it_stays_that_version():
    async def scenario():
        engines = [Engine("e0"), Engine("e1")]
        bench = Bench(engines)
        for version in (1, 2, 3):
            bench.update(version)
            await settle()
        assert bench.pool.version == 3
        for engine in engines:
            engine.may_answer.set()
        await bench.periodic.finish()
        assert bench.recorded == [2]

    run(scenario)


def test_a_version_that_is_due_during_an_evaluation_is_skipped_and_counted():
    async def scenario():
        engines = [Engine("e0"), Engine("e1")]
        bench = Bench(engines)
        for version in (2, 4):
            bench.update(version)
            await settle()
        for engine in engines:
            engine.may_answer.set()
        await bench.periodic.finish()
        assert bench.recorded == [2]
        assert bench.periodic.outcomes[EvaluationOutcome.SKIPPED] == 1

    run(scenario)


def test_no_other_version_is_evaluated_than_the_one_that_was_due():
    """The next update begins before an engine can be told to keep it."""

    async def scenario():
        bench = Bench([ready("e0"), ready("e1")])
        bench.update(2)
        bench.pool.close_gate(3)
        await settle()
        bench.update(3)
        await bench.periodic.finish()
        assert bench.recorded == []
        assert bench.periodic.outcomes == {EvaluationOutcome.LOST: 1}

    run(scenario)


def test_an_engine_that_breaks_loses_the_evaluation_and_not_the_run():
    async def scenario():
        engines = [Engine("e0"), Engine("e1")]
        bench = Bench(engines)
        bench.update(2)
        await settle()
        next(e for e in engines if [e.name] == bench.pool.pinned_engines).interrupt()
        await bench.periodic.finish()
        assert bench.recorded == []
        assert bench.periodic.metrics() == {
            "evaluations_done_total": 0.0,
            "evaluations_skipped_total": 0.0,
            "evaluations_lost_total": 1.0,
        }
        await bench.pool.close()

    run(scenario)


def test_another_failure_of_an_evaluation_is_raised_as_soon_as_it_comes():
    async def scenario():
        bench = Bench([ready("e0"), ready("e1")])
        bench.failure = OSError("disk full")
        bench.update(2)
        with pytest.raises(OSError, match="disk full"):
            await bench.periodic.watch()
        with pytest.raises(OSError, match="disk full"):
            await bench.periodic.finish()

    run(scenario)
