"""The product with a micro config: SFT once, then RL from its model in three layouts, whole.

Everything is real: `magistral` in a process of its own, Megatron ranks, an SGLang server, the
verifier service. Asserted is what a run leaves behind and what was seen while it ran.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_magistral.audit_run import audit_run
from megatron_magistral.cluster import Role, Supervisor, free_ports
from megatron_magistral.config import Config
from megatron_magistral.config_file import load
from megatron_magistral.evals.report import EvalReport
from megatron_magistral.rollout.audit import Fate
from megatron_magistral.rollout.generator import Generator, SamplingSettings
from megatron_magistral.rollout.sglang_server import (
    ServerSettings,
    model_limits,
    server_command,
    server_environment,
)
from megatron_magistral.run_folder import RunFolder, Stage
from megatron_magistral.trainer.checkpoint_files import CheckpointFolder
from megatron_magistral.types import Completion
from tests.cli_runs import MICRO, ROLES, CliRun

pytestmark = [pytest.mark.sglang, pytest.mark.distributed]

LAYOUTS = {
    "tp2": ("parallel.tensor=2",),
    "pp2": ("parallel.tensor=1", "parallel.pipeline=2"),
    "dp2": ("parallel.tensor=1", "parallel.data=2"),
}
SERVER_TIMEOUT_S = 300.0
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Finished:
    """A run that ended: its exit code and output, what is on disk, what was seen."""

    returncode: int
    output: str
    run: RunFolder
    config: Config
    first_model: Path
    crowds: list[dict[str, set[int]]]
    left_running: list[psutil.Process]

    def rows(self, stage: str) -> list[dict]:
        rows = [json.loads(line) for line in self.run.metrics.read_text().splitlines()]
        return [row for row in rows if row["stage"] == stage]

    def samples(self) -> list[dict]:
        return [json.loads(line) for line in self.run.samples.read_text().splitlines()]


def rl_from(model: Path, *overrides: str) -> tuple[str, ...]:
    return ("train", str(MICRO), "sft=null", "model.shape=null", f"model.path={model}", *overrides)


def finish(folder: Path, first_model: Path, *arguments: str) -> Finished:
    with CliRun(folder, *arguments) as cli:
        returncode = cli.wait()
        run = RunFolder(cli.folder)
        return Finished(
            returncode=returncode,
            output=cli.output,
            run=run,
            config=load(run.config),
            first_model=first_model,
            crowds=cli.crowds,
            left_running=cli.left_running(),
        )


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = finish(tmp_path_factory.mktemp("sft"), Path(), "sft", str(MICRO))
    assert finished.returncode == 0, finished.output
    return finished


@pytest.fixture(scope="module", params=LAYOUTS)
def rl(
    request: pytest.FixtureRequest, sft: Finished, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    arguments = rl_from(sft.run.model, *LAYOUTS[request.param])
    finished = finish(tmp_path_factory.mktemp(request.param), sft.run.model, *arguments)
    assert finished.returncode == 0, finished.output
    return finished


def test_sft_lowers_the_loss_and_ends_with_a_model(sft: Finished) -> None:
    losses = [row["loss"] for row in sft.rows("sft")]
    assert len(losses) == sft.config.sft.num_steps
    assert losses[-1] < losses[0] / 2
    assert transformers.AutoModelForCausalLM.from_pretrained(sft.run.model).num_parameters() > 0


def test_every_role_is_a_process_of_its_own_and_all_run_at_once(rl: Finished) -> None:
    whole = [crowd for crowd in rl.crowds if crowd.keys() == ROLES.keys()]
    crowd = max(whole, key=lambda crowd: len(crowd["trainer"]))
    assert len(crowd["trainer"]) == rl.config.parallel.world_size == 2
    for role in crowd:
        for other in crowd.keys() - {role}:
            assert not crowd[role] & crowd[other]


def test_nothing_is_left_running(sft: Finished, rl: Finished) -> None:
    assert sft.left_running == []
    assert rl.left_running == []


def test_metrics_hold_every_step_once_and_only_finite_numbers(rl: Finished) -> None:
    rows = rl.rows("rl")
    assert [row["step"] for row in rows] == list(range(rl.config.rl.num_steps))
    for row in rows:
        numbers = {key: value for key, value in row.items() if key != "stage"}
        assert all(math.isfinite(value) for value in numbers.values()), row
        assert row.keys() >= {
            "entropy",
            "loss",
            "grad_norm",
            "train_tokens_per_s",
            "queue_sequences",
            "staleness_mean",
            "update_total_s",
        }
        assert row["skipped"] == 0.0
        if "groups_taken" in row:  # a batch may have been graded whole before the step before it
            assert row.keys() >= {
                "reward_mean",
                "reward_format",
                "reward_correctness",
                "reward_language",
                "reward_length",
                "completion_tokens_mean",
            }
    assert "groups_taken" in rows[0]


def test_tensorboard_holds_the_same_numbers(rl: Finished) -> None:
    board = EventAccumulator(str(rl.run.root / "tensorboard" / "rl"))
    board.Reload()
    for key in ("reward_mean", "loss"):
        shown = {event.step: event.value for event in board.Scalars(f"rl/{key}")}
        rows = {row["step"]: row[key] for row in rl.rows("rl") if key in row}
        assert shown == pytest.approx(rows)


def test_weights_reach_the_generator_before_the_first_prompt_and_after_every_step(
    rl: Finished,
) -> None:
    before, after = EvalReport.load(rl.run.eval_before_rl), EvalReport.load(rl.run.eval_after_rl)
    assert (before.protocol["version"], after.protocol["version"]) == (0, rl.config.rl.num_steps)
    num_updates = 1 + sum(row["update_bytes"] > 0 for row in rl.rows("rl"))
    assert num_updates >= 4


def test_every_prompt_group_is_accounted_for(rl: Finished) -> None:
    report = audit_run(rl.run)
    assert report.findings == ()
    assert report.num_steps == rl.config.rl.num_steps
    assert report.count(Fate.TRAINED) == report.num_steps * rl.config.rl.groups_per_batch


def test_every_sample_says_which_version_sampled_which_token(rl: Finished) -> None:
    samples = rl.samples()
    assert {sample["step"] for sample in samples} == set(range(rl.config.rl.num_steps))
    for sample in samples:
        spans = sample["spans"]
        assert spans[0][1] == 0
        for (version, _, end), (later, start, _) in pairwise(spans):
            assert version < later and end == start
        assert spans[-1][0] <= sample["step"]  # nothing is sampled by weights not yet trained


def test_generation_runs_ahead_of_training(rl: Finished) -> None:
    """Some tokens are older than the newest weights, and none older than the run."""
    rows, config = rl.rows("rl"), rl.config.rl
    assert any(row["staleness_mean"] > 0 for row in rows)
    assert all(row["staleness_max"] <= row["step"] for row in rows)
    assert all(row["queue_sequences"] <= config.n_async + config.queue_capacity for row in rows)


def test_weights_change_in_the_middle_of_generation(rl: Finished) -> None:
    assert any(row["mixed_version_sequences"] > 0 for row in rl.rows("rl"))


def test_verifiers_grade_every_completion(rl: Finished) -> None:
    assert all(row["masked_completions"] == 0 for row in rl.rows("rl"))
    for path in (rl.run.eval_before_rl, rl.run.eval_after_rl):
        report = EvalReport.load(path)
        assert report.num_masked == 0
        assert report.overall.num_problems == rl.config.evaluation.num_problems
        assert report.format_rate > 0


def test_a_run_ends_with_the_table_of_held_out_results(rl: Finished) -> None:
    assert "Held-out problems, pass@1 over" in rl.output
    for label in ("before RL", "after RL", "mean reward", "format rate", "language consistency"):
        assert label in rl.output
    assert rl.output.splitlines()[-1] == f"run folder: {rl.run.root}"


def test_rl_changes_every_weight_and_nothing_of_the_shape(rl: Finished) -> None:
    before, after = (
        load_file(folder / "model.safetensors") for folder in (rl.first_model, rl.run.model)
    )
    assert {name: w.shape for name, w in before.items()} == {
        name: w.shape for name, w in after.items()
    }
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    transformers.AutoModelForCausalLM.from_pretrained(rl.run.model)


@pytest.mark.parametrize("rl", ["tp2"], indirect=True)
def test_the_final_model_is_the_same_in_transformers_and_in_sglang(
    rl: Finished, tmp_path: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(rl.run.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(rl.run.model, dtype=torch.float32)
    prompts = [tokenizer.encode(sample["statement"]) for sample in rl.samples()[:4]]
    for completion in asyncio.run(sample_from_server(rl.run.model, prompts, tmp_path)):
        ids = torch.tensor([completion.prompt_ids + completion.output_ids])
        with torch.no_grad():
            logits_SV = model(ids).logits[0]
        logprobs_SV = torch.log_softmax(logits_SV[len(completion.prompt_ids) - 1 : -1], dim=-1)
        outputs_T = torch.tensor(completion.output_ids)
        expected_T = logprobs_SV.gather(-1, outputs_T[:, None])[:, 0]
        assert len(outputs_T) == 64
        assert (torch.tensor(completion.logprobs) - expected_T).abs().max() < TOLERANCE


async def sample_from_server(
    model: Path, prompts: list[list[int]], folder: Path
) -> list[Completion]:
    (port,) = free_ports(1)
    settings = ServerSettings(
        model_dir=model, port=port, context_length=256, dtype="float32", max_total_tokens=4096
    )
    environment = server_environment(settings, os.environ)
    role = Role("server", tuple(server_command(settings)), folder / "server.log", environment)
    sampling = SamplingSettings(max_new_tokens=64, ignore_eos=True)
    with Supervisor() as supervisor:
        supervisor.start(role)
        async with Generator(settings.url, model_limits(settings)) as generator:
            await generator.wait_ready(SERVER_TIMEOUT_S)
            return await asyncio.gather(
                *(generator.generate(p, sampling, cache_salt="final") for p in prompts)
            )


@pytest.fixture
def running(sft: Finished, tmp_path: Path) -> Iterator[CliRun]:
    """A run in the middle of its RL stage."""
    endless = ("rl.num_steps=100000", "evaluation.num_problems=2", "checkpoint.grace_s=300")
    with CliRun(tmp_path, *rl_from(sft.run.model, *endless)) as cli:
        cli.wait_until(lambda: "rl 1/100000" in cli.output)
        assert cli.crowds[-1].keys() == ROLES.keys()
        yield cli


def test_ctrl_c_during_rl_saves_and_ends_every_process(running: CliRun) -> None:
    running.process.send_signal(signal.SIGINT)
    assert running.wait() == 130
    assert running.left_running() == []
    assert running.output.endswith("SIGINT: every process was ended\n")
    assert "Traceback" not in running.output
    run = RunFolder(running.folder)
    saved = CheckpointFolder(run.checkpoints(Stage.RL)).latest()
    assert saved is not None and saved >= 1
    assert audit_run(run).findings == ()


def test_a_role_that_dies_is_named_with_the_end_of_its_log_and_ends_the_run(
    running: CliRun,
) -> None:
    (controller,) = (
        process
        for process in psutil.Process(running.process.pid).children()
        if process.pid in running.pids("controller")
    )
    controller.kill()
    assert running.wait() == 1
    assert running.left_running() == []
    assert "controller was killed by SIGKILL after" in running.output
    log = RunFolder(running.folder).log("controller")
    said = lines(running.output.partition(f"the end of {log}:\n")[2])
    assert len(said) > 1
    assert set(said) <= set(lines(log.read_text()))


def lines(text: str) -> list[str]:
    """As a terminal shows them."""
    return [line.expandtabs().rstrip() for line in text.splitlines()]
