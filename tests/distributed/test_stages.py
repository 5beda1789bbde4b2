"""The stages on one rank: interrupted and gone on with, and when the numbers run away."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_magistral.config_stages import CheckpointConfig, OptimizerConfig, RlConfig, SftConfig
from megatron_magistral.trainer.checkpoint import Checkpointer
from megatron_magistral.trainer.checkpoint_files import CheckpointFolder
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.loop import train_rl
from megatron_magistral.trainer.megatron import destroy_distributed, destroy_model_parallel
from megatron_magistral.trainer.nonfinite import NonFiniteSteps, NonFiniteWatch, read_kept_batch
from megatron_magistral.trainer.sft import train_sft
from megatron_magistral.trainer.step import Trainer
from megatron_magistral.types import Batch, Minibatch, Progress
from tests.distributed.ranks import run_ranks
from tests.trainer.models import VOCAB_SIZE, hf_model, random_sequences, save

pytestmark = pytest.mark.distributed

NUM_STEPS, INTERRUPTED_AT = 6, 4


class Recorder:
    """Takes the place of a MetricsWriter."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, float]] = []

    def write(self, step: int, values: dict[str, float]) -> None:
        self.rows.append((step, values["loss"], values["grad_norm"]))


def stage(
    hf_dir: Path, root: Path, num_steps: int, optimizer: OptimizerConfig
) -> list[tuple[int, float, float]]:
    rng = random.Random(0)
    traces = [([1, 2, 3], [rng.randrange(VOCAB_SIZE) for _ in range(9)]) for _ in range(10)]
    config = SftConfig(num_steps=num_steps, batch_size=3, microbatch_tokens=32, optimizer=optimizer)
    t = Trainer.create(hf_dir, ParallelLayout(), optimizer.settings(NUM_STEPS), timeout_s=60)
    checkpoints = Checkpointer(
        t, CheckpointFolder(root / "checkpoints"), CheckpointConfig(), every_steps=2, training={}
    )
    watch = NonFiniteWatch("sft", optimizer.max_nonfinite_steps, root / "nonfinite", data_rank=0)
    recorder: Any = Recorder()
    start = checkpoints.restore()
    try:
        train_sft(t, traces, config, 0, checkpoints, watch, start, recorder)
    finally:
        destroy_model_parallel()
    return recorder.rows


def interrupted_and_not(hf_dir: Path, root: Path) -> Any:
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-4, schedule="cosine", warmup_steps=2)
    straight = stage(hf_dir, root / "straight", NUM_STEPS, optimizer)
    parts = [
        stage(hf_dir, root / "parts", num_steps, optimizer)
        for num_steps in (INTERRUPTED_AT, NUM_STEPS, NUM_STEPS)
    ]
    destroy_distributed()
    return straight, parts


def running_away(hf_dir: Path, root: Path) -> str:
    try:
        stage(hf_dir, root, NUM_STEPS, OptimizerConfig(lr=1e30, max_nonfinite_steps=2))
    except NonFiniteSteps as error:
        return str(error)
    finally:
        destroy_distributed()
    return ""


def test_an_interrupted_stage_goes_on_with_the_same_data_and_is_not_repeated(
    tmp_path: Path,
) -> None:
    hf_dir = save(hf_model("llama"), tmp_path / "model")
    ((straight, (first, second, third)),) = run_ranks(
        interrupted_and_not, 1, hf_dir, tmp_path, timeout_s=300
    )
    assert [step for step, _, _ in straight] == list(range(NUM_STEPS))
    assert first + second == straight
    assert [step for step, _, _ in second] == list(range(INTERRUPTED_AT, NUM_STEPS))
    assert third == []


def test_a_stage_whose_numbers_run_away_ends_with_the_reason_and_the_batches(
    tmp_path: Path,
) -> None:
    hf_dir = save(hf_model("llama"), tmp_path / "model")
    (message,) = run_ranks(running_away, 1, hf_dir, tmp_path, timeout_s=300)
    assert message.startswith("sft step 2: 2 optimizer steps in a row were skipped, the last with ")
    kept = [read_kept_batch(path) for path in sorted((tmp_path / "nonfinite").iterdir())]
    assert [(batch.step, len(batch.sequences)) for batch in kept] == [(1, 3), (2, 3)]


# --- RL ---------------------------------------------------------------------------------------


@dataclass
class Controller:
    """Takes the place of feed and publisher: notes what the trainer asks of them, in order."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def start(self, progress: Progress) -> None:
        self.calls.append(("start", progress))

    def publish(self, version: int) -> dict[str, float]:
        self.calls.append(("publish", version))
        return {}

    def pull(self, step: int, data_rank: int, num_updates: int) -> Batch:
        self.calls.append(("pull", step))
        sequences = tuple(random_sequences([(3, 12), (1, 10)], seed=step))
        # Two groups a step, of which one in three admitted is dropped.
        return Batch(step, (Minibatch(sequences, (0, 0)),), (3 * step + 1, 3 * step))

    def acknowledge(self, step: int, metrics: dict[str, float]) -> None:
        self.calls.append(("acknowledge", step))
        self.losses.append(metrics["loss"])


def rl_stage(hf_dir: Path, root: Path, num_steps: int) -> Controller:
    config = RlConfig.model_validate(
        {
            "num_steps": num_steps,
            "group_size": 2,
            "n_batch": 2,
            "n_minibatch": 2,
            "n_async": 2,
            "microbatch_tokens": 64,
            "optimizer": {"lr": 1e-3},
            "algorithm": {"kl_coef": 0.1, "ema_decay": 0.9},
        }
    )
    settings = config.optimizer.settings(num_steps)
    t = Trainer.create(hf_dir, ParallelLayout(), settings, timeout_s=60, ema_decay=0.9)
    checkpoints = Checkpointer(
        t, CheckpointFolder(root), CheckpointConfig(), every_steps=2, training={}
    )
    controller: Any = Controller()
    watch = NonFiniteWatch("rl", 3, None, data_rank=0)
    train_rl(t, controller, controller, config, checkpoints, watch, speaks=True)
    destroy_model_parallel()
    return controller


def rl_interrupted_and_not(hf_dir: Path, root: Path) -> tuple[Controller, list[Controller]]:
    straight = rl_stage(hf_dir, root / "straight", NUM_STEPS)
    parts = [rl_stage(hf_dir, root / "parts", n) for n in (INTERRUPTED_AT, NUM_STEPS, NUM_STEPS)]
    destroy_distributed()
    return straight, parts


def test_rl_goes_on_with_the_weights_and_the_step_that_come_next(tmp_path: Path) -> None:
    hf_dir = save(hf_model("llama"), tmp_path / "model")
    ((straight, (first, second, third)),) = run_ranks(
        rl_interrupted_and_not, 1, hf_dir, tmp_path, timeout_s=300
    )
    assert first.calls[:3] == [("start", Progress(0)), ("publish", 0), ("pull", 0)]
    n = INTERRUPTED_AT
    assert second.calls[:4] == [
        ("start", Progress(n)),
        ("publish", n),
        ("pull", n),
        ("publish", n + 1),
    ]
    assert first.losses + second.losses == straight.losses
    last = Progress(NUM_STEPS)
    assert third.calls == [("start", last), ("publish", NUM_STEPS)]
