"""The checkpoint of a version that is evaluated beside training is there when the result is."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.rollout.evaluator import Evaluator
from megatron_magistral.rollout.generator import SamplingSettings
from megatron_magistral.run_folder import RunFolder, Stage
from megatron_magistral.trainer.checkpoint_files import CheckpointFolder, SavedState
from megatron_magistral.types import Progress, Reward
from tests.fakes import problem_of
from tests.rollout.test_controller_watching import CONFIG
from tests.rollout.test_engine_pool import Engine, run, serve, settle

KEEP_LAST = 2


class Bench:
    """Two engines, of which the pinned one evaluates until it is told to answer."""

    def __init__(self, root: Path) -> None:
        self.engines = [Engine("a"), Engine("b")]
        self.pool = EnginePool(self.engines)
        folder = RunFolder(root)
        self.checkpoints = CheckpointFolder(folder.checkpoints(Stage.RL))
        self.evaluator = Evaluator(
            CONFIG,
            folder,
            self.pool,
            [problem_of()],
            lambda problem: (1,),
            lambda temperature, top_p: SamplingSettings(max_new_tokens=4),
            self.grade,
        )

    async def grade(self, problem, completion, group) -> Reward:
        return Reward(0.1, 0.9, 0.0, 0.0, passed_fraction=1.0)

    async def train_to(self, version: int) -> None:
        """New weights, then their checkpoint, as trainers do it."""
        free = [e for e in self.engines if e.name not in self.pool.pinned_engines]
        serve(self.pool, free, version)
        self.evaluator.weights_changed(version)
        await settle()
        self.checkpoints.begin(version)
        self.checkpoints.commit(version, SavedState(Progress(version), {}, {}), {})
        self.checkpoints.prune(KEEP_LAST, 0)

    def answer(self) -> None:
        for engine in self.engines:
            engine.may_answer.set()


def test_the_best_checkpoint_outlives_an_evaluation_of_any_length(tmp_path):
    async def scenario():
        bench = Bench(tmp_path)
        for version in range(1, 6):
            await bench.train_to(version)
        assert bench.checkpoints.steps() == [2, 4, 5]
        bench.answer()
        await bench.evaluator.finish()
        bench.checkpoints.prune(KEEP_LAST, 0)
        best = bench.checkpoints.best()
        assert best is not None and best.step == 2
        assert bench.checkpoints.steps() == [2, 4, 5]
        await bench.pool.close()

    run(scenario)


@pytest.mark.parametrize("ending", ["cancel", "interrupt"])
def test_an_evaluation_without_a_result_keeps_no_checkpoint(tmp_path, ending):
    async def scenario():
        bench = Bench(tmp_path)
        for version in range(1, 6):
            await bench.train_to(version)
        if ending == "cancel":
            await bench.evaluator.cancel()
        else:
            next(e for e in bench.engines if [e.name] == bench.pool.pinned_engines).interrupt()
            await bench.evaluator.finish()
        bench.checkpoints.prune(KEEP_LAST, 0)
        assert bench.checkpoints.steps() == [4, 5] and bench.checkpoints.best() is None
        await bench.pool.close()

    run(scenario)
