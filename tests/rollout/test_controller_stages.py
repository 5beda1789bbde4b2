"""The controller changes stages between two steps, and finds its stage again after it was ended.

Controller, desk, queue, journal and pool are real; engines answer at once, a thread plays the
trainers.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_magistral.cluster import free_ports
from megatron_magistral.config import Config
from megatron_magistral.data.pass_rates import read_pass_rates
from megatron_magistral.data.tokenizer import build_tokenizer
from megatron_magistral.jsonl import read_rows
from megatron_magistral.rollout.completion import NewTokens
from megatron_magistral.rollout.controller import Controller
from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.rollout.stages import LaterStage
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.trainer.feed import Feed
from megatron_magistral.types import Batch, Progress, Reward
from tests.fakes import completion_of, problem_of

NUM_STEPS = 7
EASY = [problem_of(f"What is {i} + 1?", id=f"easy{i}") for i in range(6)]
HARD = [problem_of(f"What is {i} * 7?", id=f"hard{i}") for i in range(4)]
HELD_OUT = [problem_of("What is 9 + 9?", id="held out")]

CONFIG = Config.model_validate(
    {
        "model": {"shape": {}},
        "data": {"tiny_world": {}},
        "reward": {"l_max": 40, "l_cache": 10},
        "evaluation": {"num_samples": 1},
        "rl": {
            "num_steps": NUM_STEPS,
            "group_size": 2,
            "n_batch": 8,
            "n_minibatch": 8,
            "n_async": 8,
            "kv_budget_tokens": 600,
            "microbatch_tokens": 512,
            "batch_timeout_s": 60,
            "optimizer": {"lr": 1.0},
            "stages": [
                {
                    # Every completion is as long as it may be, so the stage lasts a window.
                    "begin": {"max_near_l_max": 0.5, "window": 3},
                    "l_max": 60,
                    "n_batch": 4,
                    "n_minibatch": 4,
                    "n_async": 4,
                    "kv_budget_tokens": 200,
                }
            ],
        },
    }
)


class InstantEngine:
    """Answers with as many tokens as it may."""

    name = "engine"

    async def generate(self, prompt_ids, sampling, *, cache_salt, partial=None, on_tokens=None):
        await asyncio.sleep(0)
        version = int(cache_salt[1:])
        done = completion_of(sampling.max_new_tokens, version=version)
        if on_tokens is not None:
            on_tokens(NewTokens(0, done.output_ids, done.logprobs, version))
        return done

    def interrupt(self) -> None: ...

    async def wait_ready(self, timeout_s: float) -> None: ...


class Grade:
    """Of one stage: one member of each group is right. Notes how long completions were."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.lengths: set[int] = set()

    async def __call__(self, problem, completion, group) -> Reward:
        solved = float(group not in self.seen)
        self.seen.add(group)
        self.lengths.add(len(completion.output_ids))
        return Reward(0, solved, 0, 0, passed_fraction=solved)


class Trainers:
    """Pull, publish, acknowledge, as `train_rl` does it."""

    def __init__(self, port: int) -> None:
        self.feed = Feed(f"http://127.0.0.1:{port}", batch_timeout_s=60)
        self.batches: dict[int, Batch] = {}

    def train(self, first: int, end: int) -> None:
        self.feed.wait_ready(30)
        self.feed.start(Progress(first))
        self.publish(first)
        for step in range(first, end):
            batch = self.feed.pull(step, 0)
            assert isinstance(batch, Batch)
            self.batches[step] = batch
            self.publish(step + 1)
            self.feed.acknowledge(step, {"loss": 0.0})

    def publish(self, version: int) -> None:
        self.feed.begin_update(version)
        self.feed.end_update(version)


@dataclass(frozen=True)
class Ran:
    """What is there after a controller has served some steps."""

    trainers: Trainers
    graders: tuple[Grade, Grade]
    run: RunFolder

    @property
    def sizes(self) -> list[int]:
        batches = [self.trainers.batches[step] for step in sorted(self.trainers.batches)]
        return [sum(len(m.sequences) for m in batch.minibatches) for batch in batches]

    def second_stage(self) -> dict[str, Any]:
        lines = map(json.loads, self.run.curriculum.read_text().splitlines())
        (began,) = [line for line in lines if line["type"] == "stage"]
        return began


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer([problem.statement for problem in EASY], 300)


class SilentEngine(InstantEngine):
    """Never answers."""

    async def generate(self, *arguments, **named):
        await asyncio.Event().wait()


def run_until(
    tokenizer: Any,
    root: Path,
    first: int,
    end: int,
    engine: InstantEngine | None = None,
    num_waiting: int = 0,
) -> Ran:
    """A controller from `first` on, which is ended after step `end` - 1, once so many completions
    wait in its queue."""

    async def scenario() -> Ran:
        run = RunFolder(root)
        (port,) = free_ports(1)
        ran = Ran(Trainers(port), (Grade(), Grade()), run)
        controller = Controller(
            CONFIG,
            run,
            EnginePool([engine or InstantEngine()]),
            ran.graders[0],
            tokenizer,
            "{problem}",
            EASY,
            HELD_OUT,
            [LaterStage(HARD, ran.graders[1])],
        )
        serving = asyncio.create_task(controller.run("127.0.0.1", port))
        training = asyncio.create_task(asyncio.to_thread(ran.trainers.train, first, end))
        await asyncio.wait([serving, training], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        await training
        while controller._queue.num_waiting < num_waiting:
            await asyncio.sleep(0.01)
        if end < NUM_STEPS:
            serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        return ran

    return asyncio.run(asyncio.wait_for(scenario(), 120))


def test_everything_changes_between_two_steps(tokenizer: Any, tmp_path: Path) -> None:
    ran = run_until(tokenizer, tmp_path, 0, NUM_STEPS)
    assert ran.sizes == [8, 8, 8, 4, 4, 4, 4]
    began = ran.second_stage()
    assert (began["step"], began["rule"]) == (3, "near l_max")
    for batch in ran.trainers.batches.values():
        l_max = [40 if ordinal < began["first_ordinal"] else 60 for ordinal in batch.ordinals]
        trained = {s.num_output_tokens for m in batch.minibatches for s in m.sequences}
        assert trained == set(l_max)  # each group by the l_max of its own stage
    rows = [json.loads(line) for line in ran.run.metrics.read_text().splitlines()]
    assert [row["stage_index"] for row in rows] == [0, 0, 0, 1, 1, 1, 1]
    assert [row["stage_problems"] for row in rows] == [6, 6, 6, 10, 10, 10, 10]
    assert [row["kv_budget_tokens"] for row in rows] == [600] * 3 + [200] * 4
    assert 0 < rows[0]["kv_used_tokens_max"] <= 600
    assert rows[-1]["kv_used_tokens_max"] <= 200


def test_groups_are_graded_by_their_own_stage(tokenizer: Any, tmp_path: Path) -> None:
    ran = run_until(tokenizer, tmp_path, 0, NUM_STEPS)
    first, second = ran.graders
    # The second also graded the evaluation at the end, by what holds then.
    assert (first.lengths, second.lengths) == ({40}, {60})
    assert "evaluation" in first.seen & second.seen
    groups = {group for group in first.seen & second.seen if group.isdigit()}
    assert groups == set()


def test_pass_rates_are_of_every_group(tokenizer: Any, tmp_path: Path) -> None:
    ran = run_until(tokenizer, tmp_path, 0, NUM_STEPS)
    rates = read_pass_rates(ran.run.pass_rates)
    assert set(rates.values()) == {0.5}
    assert any(name.startswith("hard") for name in rates)


@pytest.mark.parametrize(("ended_after", "goes_on_from"), [(2, 1), (4, 2), (4, 4), (5, 3)])
def test_a_controller_that_was_ended_goes_on_in_its_stage(
    tokenizer: Any, tmp_path: Path, ended_after: int, goes_on_from: int
) -> None:
    before = run_until(tokenizer, tmp_path, 0, ended_after)
    after = run_until(tokenizer, tmp_path, goes_on_from, NUM_STEPS)
    assert before.sizes == [8, 8, 8, 4, 4][:ended_after]
    assert after.sizes == [8, 8, 8, 4, 4, 4, 4][goes_on_from:]
    for step in range(goes_on_from, ended_after):  # repeated, not made anew
        first, second = (ran.trainers.batches[step] for ran in (before, after))
        assert first.ordinals == second.ordinals
    assert after.second_stage()["step"] == 3
    # While steps are repeated, generation goes on where it was: in the stage that had begun.
    first_of_later = min(3, goes_on_from) if ended_after > 3 else 3
    budgets = [row["kv_budget_tokens"] for row in read_rows(after.run.metrics)]
    assert budgets == [600] * first_of_later + [200] * (NUM_STEPS - first_of_later)


def test_rewards_of_groups_that_an_earlier_controller_graded_are_in_the_row_of_their_step(
    tokenizer: Any, tmp_path: Path
) -> None:
    run_until(tokenizer, tmp_path, 0, 1, num_waiting=8)
    after = run_until(tokenizer, tmp_path, 1, 2, SilentEngine())
    assert [row["reward_mean"] for row in read_rows(after.run.metrics)] == [0.5, 0.5]
