"""A trainer that is saved and restored goes on as if nothing had happened, in any layout."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from megatron_magistral.config_stages import CheckpointConfig
from megatron_magistral.trainer.checkpoint import Checkpointer, StopRequested
from megatron_magistral.trainer.checkpoint_files import CheckpointError, CheckpointFolder
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.megatron import destroy_distributed, destroy_model_parallel
from megatron_magistral.trainer.settings import OptimizerSettings, Schedule
from megatron_magistral.trainer.step import StepStats, Trainer
from megatron_magistral.types import Progress
from tests.distributed.cases import OBJECTIVE, share
from tests.distributed.ranks import run_ranks
from tests.trainer.models import hf_model, random_sequences, save

pytestmark = pytest.mark.distributed

LENGTHS = [(3, 12), (1, 30), (5, 20), (2, 33), (1, 9)]
NUM_BEFORE, NUM_AFTER = 3, 5
ADAM = OptimizerSettings(
    lr=1e-3,
    min_lr=1e-4,
    schedule=Schedule.COSINE,
    warmup_steps=5,  # still warming up when the checkpoint is made
    total_steps=10,
    weight_decay=0.1,
    clip_grad=0.5,
)
TP, PP, DP = ParallelLayout(tp=2), ParallelLayout(pp=2), ParallelLayout(dp=2)
VPP = ParallelLayout(pp=2, vpp=2)
ROUTES = [(TP, TP), (PP, PP), (DP, DP), (TP, PP), (PP, DP), (DP, VPP), (VPP, TP)]
TIED_ROUTES = [(PP, PP), (TP, PP)]
EP, TP_EP = ParallelLayout(dp=2, ep=2), ParallelLayout(tp=2, ep=2)
EXPERT_ROUTES = [(EP, EP), (EP, DP)]
MORE_EXPERT_ROUTES = [(TP_EP, TP_EP), (DP, TP_EP), (TP, EP), (PP, EP), (EP, TP), (TP_EP, VPP)]


@dataclass(frozen=True)
class After:
    """Where the steps after the checkpoint began, what they did, and where they ended."""

    first_weights: dict[str, Tensor]
    stats: list[StepStats]
    weights: dict[str, Tensor]
    average: dict[str, Tensor]
    random_numbers: list[float]


def make_trainer(
    hf_dir: Path, layout: ParallelLayout, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Trainer:
    return Trainer.create(
        hf_dir, layout, ADAM, dtype=dtype, seed=seed, timeout_s=60, ema_decay=0.75
    )


def make_checkpointer(t: Trainer, root: Path, **changes: Any) -> Checkpointer:
    config = CheckpointConfig(**changes)
    return Checkpointer(
        t, CheckpointFolder(root), config, every_steps=NUM_BEFORE, training={"rl.optimizer.lr": 1}
    )


def step(t: Trainer, number: int) -> StepStats:
    sequences = random_sequences(LENGTHS, seed=number)
    return t.train_minibatch(
        t.pack(share(sequences, t.mesh.dp_rank, t.mesh.dp_size), 64), OBJECTIVE
    )


def full_weights(t: Trainer) -> dict[str, Tensor]:
    return {name: w.clone() for bucket in t.named_hf_buckets(1 << 30) for name, w in bucket}


def go_on(t: Trainer, checkpoints: Checkpointer, first: int, num_steps: int) -> After:
    first_weights = full_weights(t)
    drawn = [random.random(), float(np.random.rand()), torch.rand(()).item()]
    stats = []
    for number in range(first, first + num_steps):
        stats.append(step(t, number))
        checkpoints.step_done(Progress(number + 1))
    weights = full_weights(t)
    assert t.average is not None
    with t.average.swapped_in():
        average = full_weights(t)
    return After(first_weights, stats, weights, average, drawn)


def routes(
    hf_dir: Path, root: Path, cases: list[tuple[ParallelLayout, ParallelLayout]], dtype: torch.dtype
) -> list[tuple[After, After]]:
    """For each pair of layouts: steps after a save in the first, and after a load in the second."""
    found = []
    for number, (first, second) in enumerate(cases):
        folder = root / str(number)
        t = make_trainer(hf_dir, first, dtype)
        checkpoints = make_checkpointer(t, folder, keep_last=10)
        random.seed(dist.get_rank())
        np.random.seed(dist.get_rank())
        go_on(t, checkpoints, 0, NUM_BEFORE)
        # Written while this goes on.
        straight = go_on(t, checkpoints, NUM_BEFORE, NUM_AFTER)
        checkpoints.wait()
        destroy_model_parallel()

        if dist.get_rank() == 0:
            CheckpointFolder(folder).go_back(NUM_BEFORE)
        dist.barrier()
        random.seed(77)
        np.random.seed(77)
        t = make_trainer(hf_dir, second, dtype, seed=1)
        checkpoints = make_checkpointer(t, folder)
        progress = checkpoints.restore()
        assert progress == Progress(NUM_BEFORE)
        found.append((straight, go_on(t, checkpoints, progress.next_step, NUM_AFTER)))
        checkpoints.wait()
        destroy_model_parallel()
    destroy_distributed()
    return found


def numbers(stats: StepStats) -> list[float]:
    """Without those that say how the sequences lay on the ranks."""
    metrics = {
        name: value
        for name, value in stats.metrics.items()
        if name not in ("padding_fraction", "load_imbalance")
    }
    return [stats.loss, stats.grad_norm, stats.lr, *metrics.values()]


def check_routes(
    results: list[list[tuple[After, After]]], cases: list[tuple[ParallelLayout, ParallelLayout]]
) -> None:
    for rank in results:
        for (first, second), (straight, resumed) in zip(cases, rank, strict=True):
            case = f"{first} -> {second}"
            for name, w in straight.first_weights.items():
                assert torch.equal(resumed.first_weights[name], w), (case, name)
            for got, want in zip(resumed.stats, straight.stats, strict=True):
                assert got.status == want.status
                assert numbers(got) == pytest.approx(numbers(want), rel=1e-5, abs=1e-6), case
            for kind in ("weights", "average"):
                after, before = getattr(resumed, kind), getattr(straight, kind)
                assert after.keys() == before.keys()
                for name, w in before.items():
                    assert (after[name] - w).abs().max() < 1e-6, (case, kind, name)
            if first == second:
                assert resumed.stats == straight.stats, case
                assert resumed.random_numbers == straight.random_numbers, case
                for kind in ("weights", "average"):
                    after, before = getattr(resumed, kind), getattr(straight, kind)
                    assert all(torch.equal(after[name], w) for name, w in before.items()), case


@pytest.mark.parametrize(
    ("family", "tied", "cases"),
    [
        pytest.param("qwen2", False, ROUTES, id="untied"),
        pytest.param("llama", True, TIED_ROUTES, id="tied", marks=pytest.mark.slow),
        pytest.param("mixtral", False, EXPERT_ROUTES, id="experts"),
        pytest.param(
            "qwen2_moe", True, MORE_EXPERT_ROUTES, id="more experts", marks=pytest.mark.slow
        ),
    ],
)
def test_the_steps_after_a_resume_are_those_of_never_having_stopped(
    tmp_path: Path, family: str, tied: bool, cases: list[tuple[ParallelLayout, ParallelLayout]]
) -> None:
    """Bit for bit in the same layout; to rounding in another."""
    hf_dir = save(hf_model(family, tied=tied), tmp_path / "model")
    results = run_ranks(routes, 2, hf_dir, tmp_path, cases, torch.float32, timeout_s=600)
    check_routes(results, cases)


@pytest.mark.slow
def test_bfloat16_goes_on_from_its_fp32_masters(tmp_path: Path) -> None:
    hf_dir = save(hf_model("llama").bfloat16().float(), tmp_path / "model")
    results = run_ranks(routes, 2, hf_dir, tmp_path, [(DP, DP)], torch.bfloat16, timeout_s=600)
    check_routes(results, [(DP, DP)])


# --- trouble ----------------------------------------------------------------------------------


def failure_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except CheckpointError as error:
        return str(error)
    return ""


def slow_and_broken_writes(hf_dir: Path, root: Path) -> dict[str, Any]:
    """What happens while a rank is still writing, and when one cannot write."""
    rank, may_write = dist.get_rank, threading.Event()
    write_data = FileSystemWriter.write_data
    found: dict[str, Any] = {}

    def held_back(self: FileSystemWriter, *args: Any) -> Any:
        if rank() == 1:
            may_write.wait(60)
        return write_data(self, *args)

    def broken(self: FileSystemWriter, *args: Any) -> Any:
        if rank() == 1:
            raise OSError("no space left")
        return write_data(self, *args)

    folder = CheckpointFolder(root)
    t = make_trainer(hf_dir, TP)
    checkpoints = make_checkpointer(t, root, timeout_s=0.5)
    checkpoints.save()
    found["before the first update"] = folder.steps()

    FileSystemWriter.write_data = held_back
    go_on(t, checkpoints, 0, NUM_BEFORE)
    saved = full_weights(t)
    go_on(t, checkpoints, NUM_BEFORE, 2)
    found["while a rank writes"] = folder.latest()
    found["late"] = failure_of(checkpoints.wait)
    may_write.set()
    while folder.latest() is None:
        checkpoints.step_done(Progress(NUM_BEFORE + 2))
        dist.barrier()
    found["once all have written"] = folder.latest()

    FileSystemWriter.write_data = broken
    checkpoints._config = CheckpointConfig()  # on a busy machine a rank fails late
    checkpoints.save()
    found["broken"] = failure_of(checkpoints.wait)
    found["after the broken one"] = folder.latest()
    FileSystemWriter.write_data = write_data
    destroy_model_parallel()

    t = make_trainer(hf_dir, TP, seed=1)
    make_checkpointer(t, root).restore()
    found["restored"] = all(torch.equal(w, saved[name]) for name, w in full_weights(t).items())
    found["left"] = sorted(path.name for path in root.iterdir())
    destroy_model_parallel()

    t = make_trainer(hf_dir, TP)
    other = Checkpointer(
        t, folder, CheckpointConfig(), every_steps=1, training={"rl.optimizer.lr": 2}
    )
    found["other training"] = failure_of(other.restore)
    dist.barrier()
    if rank() == 0:
        part = next(folder.path(NUM_BEFORE).glob("__1_*.distcp"))
        part.write_bytes(part.read_bytes()[:-1])
    dist.barrier()
    found["torn"] = failure_of(make_checkpointer(t, root).restore)
    destroy_distributed()
    return found


@pytest.fixture(scope="module")
def troubles(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("troubles")
    hf_dir = save(hf_model("llama"), root / "model")
    return run_ranks(slow_and_broken_writes, 2, hf_dir, root / "checkpoints", timeout_s=600)


def test_nothing_is_saved_before_the_first_update(troubles):
    assert [found["before the first update"] for found in troubles] == [[], []]


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(troubles):
    for found in troubles:
        assert found["while a rank writes"] is None
        assert found["once all have written"] == NUM_BEFORE
        assert found["restored"]


def test_the_wait_for_a_slow_rank_is_bounded_and_names_it(troubles):
    for found in troubles:
        assert re.fullmatch(
            rf"checkpoint of step {NUM_BEFORE}: ranks \[1\] are still writing after training has "
            r"waited \d+ s for them",
            found["late"],
        )


def test_a_rank_that_cannot_write_is_named_on_all_and_the_former_checkpoint_stays(troubles):
    for found in troubles:
        assert found["broken"] == (
            f"checkpoint of step {NUM_BEFORE + 2}: rank 1 could not write its part: "
            "OSError: no space left"
        )
        assert found["after the broken one"] == NUM_BEFORE
        assert found["left"] == ["latest", f"step-{NUM_BEFORE:08d}"]


def test_another_training_is_refused_on_all_ranks(troubles):
    for found in troubles:
        assert (
            "is of another training: rl.optimizer.lr = 2, was 1. To go on"
            in found["other training"]
        )


def test_a_torn_file_is_one_error_on_all_ranks(troubles):
    for found in troubles:
        assert found["torn"] == troubles[0]["torn"]
        assert re.search(r"__1_0\.distcp: has \d+ bytes; \d+ were written", found["torn"])


def asked_to_stop(hf_dir: Path, root: Path) -> tuple[int, str, int | None]:
    """The step after which a rank stopped, what it said, and the latest checkpoint then."""
    t, folder, stop = make_trainer(hf_dir, TP), CheckpointFolder(root / "c"), root / "stop"
    training: dict[str, Any] = {}
    config = CheckpointConfig()
    checkpoints = Checkpointer(t, folder, config, every_steps=0, training=training, stop=stop)
    try:
        for number in range(9):
            if number == 2 and dist.get_rank() == 0:
                stop.touch()
            step(t, number)
            checkpoints.step_done(Progress(number + 1))
    except StopRequested as stopped:
        destroy_distributed()
        return number, str(stopped), folder.latest()
    raise AssertionError("nobody stopped")


def test_a_run_that_is_asked_to_stop_saves_after_the_step_on_every_rank(tmp_path: Path) -> None:
    hf_dir = save(hf_model("llama"), tmp_path / "model")
    found = run_ranks(asked_to_stop, 2, hf_dir, tmp_path, timeout_s=600)
    assert found == [(2, "asked to stop: saved after step 3", 3)] * 2
