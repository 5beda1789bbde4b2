"""What a run shows while it goes on: metrics, Prometheus, evaluations beside training, eps_high.

Controller, desk, queue, journal and pool are real; engines answer at once, a thread plays the
trainers.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_magistral.cluster import free_ports
from megatron_magistral.config import Config
from megatron_magistral.data.tokenizer import build_tokenizer
from megatron_magistral.evals.report import EvalReport
from megatron_magistral.jsonl import read_rows
from megatron_magistral.rollout.controller import Controller
from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.run_folder import RunFolder, Stage
from megatron_magistral.trainer.checkpoint_files import CheckpointFolder
from megatron_magistral.trainer.feed import Feed
from megatron_magistral.types import Batch, Progress
from tests.fakes import problem_of
from tests.rollout.test_controller_stages import Grade, InstantEngine

NUM_STEPS = 6
PROBLEMS = [problem_of(f"What is {i} + 1?", id=f"p{i}") for i in range(6)]
# Falls out of its band after two steps, and comes back into it.
ENTROPIES = (1.0, 1.0, 0.5, 0.5, 1.0, 1.0)

CONFIG = Config.model_validate(
    {
        "model": {"shape": {}},
        "data": {"tiny_world": {}},
        "reward": {"l_max": 40, "l_cache": 10},
        "generator": {"num_replicas": 2},
        "checkpoint": {"rl_every_steps": 2},
        "evaluation": {"num_samples": 1, "every_steps": 2},
        "rl": {
            "num_steps": NUM_STEPS,
            "group_size": 2,
            "n_batch": 4,
            "n_minibatch": 4,
            "n_async": 4,
            "microbatch_tokens": 512,
            "optimizer": {"lr": 1.0},
            "algorithm": {
                "eps_high": 0.27,
                "entropy": {"control": "act", "target": 1.0, "smoothing": 0.0},
            },
        },
    }
)


class NamedEngine(InstantEngine):
    def __init__(self, name: str) -> None:
        self.name = name


@dataclass
class Watched:
    """Trainers that spare pinned engines, and what they and a scrape saw."""

    url: str
    eps_high: dict[int, float | None] = field(default_factory=dict)
    scraped: dict[str, float] = field(default_factory=dict)

    def train(self, first: int, end: int) -> None:
        feed = Feed(self.url, batch_timeout_s=60)
        feed.wait_ready(30)
        feed.start(Progress(first))
        self.publish(feed, first)
        for step in range(first, end):
            batch = feed.pull(step, 0)
            assert isinstance(batch, Batch)
            self.eps_high[step] = batch.eps_high
            self.publish(feed, step + 1)
            feed.acknowledge(step, {"loss": 0.25, "entropy": ENTROPIES[step]})
            if step + 1 < NUM_STEPS:
                self.scrape()
        feed.close()

    def publish(self, feed: Feed, version: int) -> None:
        pinned = feed.begin_update(version)
        feed.end_update(version, [name for name in ("a", "b") if name not in pinned])

    def scrape(self) -> None:
        answer = httpx.get(f"{self.url}/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        families = text_string_to_metric_families(answer.text)
        samples = [s for family in families for s in family.samples if not s.labels]
        self.scraped = {sample.name: sample.value for sample in samples}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer([problem.statement for problem in PROBLEMS], 300)


def run_until(tokenizer: Any, root: Path, first: int, end: int) -> Watched:
    """A controller from `first` on, which is ended after step `end` - 1."""

    root.mkdir(exist_ok=True)

    async def scenario() -> Watched:
        (port,) = free_ports(1)
        watched = Watched(f"http://127.0.0.1:{port}")
        pool = EnginePool([NamedEngine("a"), NamedEngine("b")])
        controller = Controller(
            CONFIG,
            RunFolder(root),
            pool,
            Grade(),
            tokenizer,
            "{problem}",
            PROBLEMS,
            PROBLEMS[:1],
            verifier_metrics=lambda: {"verifiers_open": 1.0, "verifier_faults_total": 3.0},
        )
        serving = asyncio.create_task(controller.run("127.0.0.1", port))
        training = asyncio.create_task(asyncio.to_thread(watched.train, first, end))
        await asyncio.wait([serving, training], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        await training
        if end < NUM_STEPS:
            serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        return watched

    return asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_run_shows_who_waits_for_whom_in_its_metrics_and_to_prometheus(tokenizer, tmp_path):
    watched = run_until(tokenizer, tmp_path, 0, NUM_STEPS)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(NUM_STEPS))
    gates = ("open", "full", "capacity", "staleness")
    for row in rows:
        assert sum(row[f"admission_{gate}"] for gate in gates) == pytest.approx(1.0)
        assert 0.0 <= row["generator_idle"] <= row["generator_idle_max"] <= 1.0
        assert (row["verifiers_open"], row["verifier_faults_total"]) == (1.0, 3.0)
    waits = [row["verifier_wait_s_max"] for row in rows if "verifier_wait_s_max" in row]
    assert waits and min(waits) >= 0.0
    assert watched.scraped["magistral_step"] == NUM_STEPS - 2
    assert watched.scraped["magistral_loss"] == 0.25
    assert watched.scraped["magistral_verifier_faults_total"] == 3.0
    assert watched.scraped["magistral_groups_taken_total"] >= 2 * (NUM_STEPS - 1)
    assert (tmp_path / "metrics_url").read_text() == f"{watched.url}/metrics\n"


def test_versions_are_evaluated_beside_training_and_the_best_checkpoint_is_noted(
    tokenizer, tmp_path
):
    run_until(tokenizer, tmp_path, 0, NUM_STEPS)
    for version in (2, 4):
        path = RunFolder(tmp_path).evaluation(version)
        assert EvalReport.load(path).protocol["version"] == version
    last = read_rows(tmp_path / "metrics.jsonl")[-1]
    assert last["evaluations_lost_total"] == 0
    assert "eval_pass_at_1" in last
    best = CheckpointFolder(RunFolder(tmp_path).checkpoints(Stage.RL)).best()
    assert best is not None and best.metric == "pass_at_1" and best.step in (2, 4, NUM_STEPS)


def test_eps_high_follows_the_entropy_and_a_run_that_goes_on_finds_it_again(tokenizer, tmp_path):
    whole = run_until(tokenizer, tmp_path / "whole", 0, NUM_STEPS)
    expected = [0.27, 0.27, 0.27, 0.272, 0.274, 0.274]
    assert [whole.eps_high[step] for step in range(NUM_STEPS)] == pytest.approx(expected)
    run_until(tokenizer, tmp_path / "cut", 0, 4)
    after = run_until(tokenizer, tmp_path / "cut", 4, NUM_STEPS)
    assert [after.eps_high[step] for step in (4, 5)] == pytest.approx(expected[4:])
    shown = [row["eps_high"] for row in read_rows(tmp_path / "cut" / "metrics.jsonl")]
    assert shown == pytest.approx(expected)


def test_metrics_are_one_json_object_a_line(tokenizer, tmp_path):
    run_until(tokenizer, tmp_path, 0, 2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
